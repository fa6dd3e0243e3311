"""Batches by OpenAI's form: what is read, what is answered, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest
from http_helpers import LiveServer, chat

from octavo.cli import main
from octavo.errors import EngineDeadError, PromptError
from octavo.server import batch
from octavo.server.batch import BatchLine, BatchRequest, answer_all, read_batch

COMPLETION = {"prompt": [60, 61, 62], "temperature": 0, "max_tokens": 6}
LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": COMPLETION},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": chat("Hi")},
    {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "Hi", "max_output_tokens": 3},
    },
    {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {**COMPLETION, "temprature": 1}},
    {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {**COMPLETION, "model": "gpt-4"}},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def read(path: Path) -> dict[str, dict]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["id"] for answer in answers}) == len(answers)
    assert {answer["error"] for answer in answers} == {None}
    return {answer["custom_id"]: answer["response"] for answer in answers}


def test_answers_are_those_of_the_server(live: LiveServer, tmp_path: Path) -> None:
    requests = read_batch(write(tmp_path / "in", *LINES))
    seen: list[tuple[str, int, int]] = []

    def report(what: str, completed: int, total: int) -> None:
        seen.append((what, completed, total))

    output = tmp_path / "out"
    assert live.on_events(lambda: answer_all(live.gate, live.loop, requests, output, report)) == 2
    assert seen[-1] == ("answering", 5, 5)
    answers = read(output)
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "a": 200,
        "b": 200,
        "c": 200,
        "d": 400,
        "e": 404,
    }
    expected = live.post("/v1/completions", COMPLETION).json()["choices"]
    assert answers["a"]["body"]["choices"] == expected
    assert answers["a"]["body"]["id"] == f"cmpl-{answers['a']['request_id']}"
    assert answers["b"]["body"]["object"] == "chat.completion"
    assert answers["c"]["body"]["object"] == "response"
    assert answers["d"]["body"]["error"]["param"] == "temprature"


def line_of(**changes: object) -> bytes:
    return json.dumps({**LINES[0], "custom_id": "x", **changes}).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in LINES[0].items() if key != name}).encode()


# A line that is no request, its code, the custom_id that can be read of it, and what the message names.
BAD_LINES = {
    "a word": (b"Hi", "invalid_json", None, "JSON"),
    "a string": (b'"Hi"', "invalid_request", None, "object"),
    "a list": (b"[1]", "invalid_request", None, "object"),
    "null": (b"null", "invalid_request", None, "object"),
    "half a line": (line_of()[:-9], "invalid_json", None, "JSON"),
    "two objects": (line_of() + line_of(), "invalid_json", None, "trailing"),
    "invalid UTF-8": (b'{"custom_id": "\xff"}', "invalid_json", None, "utf-8"),
    "UTF-16": (line_of().decode().encode("utf-16"), "invalid_json", None, "JSON"),
    "half a surrogate": (b'{"custom_id": "\\ud800"}', "invalid_json", None, "JSON"),
    "deep": (b'{"body": ' + b"[" * 100_000, "invalid_json", None, "recursion"),
    "deep body": (
        line_of(body=1).replace(b'"body": 1', b'"body": ' + b'{"a":' * 9000),
        "invalid_json",
        None,
        "",
    ),
    "no custom_id": (without("custom_id"), "invalid_request", None, "custom_id"),
    "empty custom_id": (line_of(custom_id=""), "invalid_request", "", "custom_id"),
    "long custom_id": (line_of(custom_id="i" * 513), "invalid_request", "i" * 513, "custom_id"),
    "numeric custom_id": (line_of(custom_id=5), "invalid_request", None, "custom_id"),
    "custom_id again": (line_of(custom_id="a"), "duplicate_custom_id", "a", "'a' was there before"),
    "no url": (without("url"), "invalid_request", "a", "url"),
    "another url": (line_of(url="/metrics"), "invalid_request", "x", "$.url"),
    "no generation": (line_of(url="/tokenize"), "invalid_request", "x", "$.url"),
    "another method": (line_of(method="GET"), "invalid_request", "x", "$.method"),
    "an extra field": (line_of(extra=1), "invalid_request", "x", "extra"),
    "no body": (without("body"), "invalid_request", "a", "body"),
    "null body": (line_of(body=None), "invalid_request", "x", "object"),
    "text as body": (line_of(body="{}"), "invalid_request", "x", "object"),
    "streamed": (line_of(body={"prompt": "a", "stream": True}), "invalid_request", "x", "not streamed"),
    "too long": (b'{"custom_id": "x", "a": "' + b"a" * 9_000_000 + b'"}', "line_too_long", None, "8388608"),
}


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""], ids=["LF", "CRLF", "no end"])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_an_error_line_and_the_rest_is_read(tmp_path: Path, name: str, ending: bytes) -> None:
    bad, code, custom_id, message = BAD_LINES[name]
    good = [json.dumps(line).encode() for line in LINES[:2]]
    lines = [good[0], bad, good[1]] if ending else [*good, bad]
    (tmp_path / "in").write_bytes((ending or b"\n").join(lines) + ending)
    found = read_batch(tmp_path / "in")
    assert [line.custom_id for line in found if isinstance(line, BatchRequest)] == ["a", "b"]
    (answer,) = (line for line in found if isinstance(line, BatchLine))
    assert (answer.custom_id, answer.response) == (custom_id, None)
    assert answer.error is not None
    number = 2 if ending else 3
    assert (answer.error.code, answer.error.line) == (code, number)
    assert answer.error.message.startswith(f"line {number}: ")
    assert message in answer.error.message


def test_blank_lines_and_byte_order_marks_do_not_count(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    lines = [json.dumps(line).encode() for line in LINES[:2]]
    (tmp_path / "in").write_bytes(mark + lines[0] + b"\n\n \t\r\n" + mark + lines[1] + b"\n" + mark)
    assert [line.custom_id for line in read_batch(tmp_path / "in")] == ["a", "b"]


def test_a_line_after_a_bad_one_may_have_its_custom_id(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(line_of(url="/nowhere") + b"\n" + line_of())
    assert [type(line) for line in read_batch(tmp_path / "in")] == [BatchLine, BatchRequest]


def test_too_many_lines_refuse_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MAX_REQUESTS", 2)
    (tmp_path / "in").write_bytes(b"a\nb\n\n")
    assert len(read_batch(tmp_path / "in")) == 2
    (tmp_path / "in").write_bytes(b"a\nb\n\nc\n")
    with pytest.raises(PromptError, match="at most 2 requests"):
        read_batch(tmp_path / "in")


def test_bad_lines_and_failing_requests_leave_the_others_answered(live: LiveServer, tmp_path: Path) -> None:
    """A body that only the server can judge, and one at which the server itself breaks."""
    bodies = [
        b'{"prompt": "\xff"}',
        b'{"prompt": [60], "prompt": []}',
        b'{"prompt": [60], "max_tokens": 99999999999999999999999}',
        b'{"prompt": [60], "temperature": 1e999}',
    ]
    broken = json.dumps({**LINES[0], "custom_id": "broken"}).encode()
    lines = [broken, b"no request"]
    for index, body in enumerate(bodies):
        lines.append(line_of(custom_id=str(index), body=0).replace(b'"body": 0', b'"body": ' + body))
    (tmp_path / "in").write_bytes(b"\n".join([*lines, json.dumps(LINES[0]).encode()]))
    requests = read_batch(tmp_path / "in")

    async def gate(scope: dict, receive: object, send: object) -> None:
        if not started:
            started.append(True)
            raise RuntimeError("a bug")
        await live.gate(scope, receive, send)  # type: ignore[arg-type]

    started: list[bool] = []
    output = tmp_path / "out"
    assert live.on_events(lambda: answer_all(gate, live.loop, requests, output, lambda *_: None)) == 6  # type: ignore[arg-type]
    answers = {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}
    assert answers.pop("a")["response"]["status_code"] == 200
    assert answers.pop("broken")["error"] == {
        "code": "server_error",
        "message": "internal error: RuntimeError",
    }
    assert answers.pop(None)["error"]["line"] == 2
    assert {answer["response"]["status_code"] for answer in answers.values()} == {400}
    assert len(answers) == len(bodies)


def test_a_dead_engine_ends_a_batch(serve_tiny: object, tmp_path: Path) -> None:
    server = serve_tiny()  # type: ignore[operator]
    requests = read_batch(write(tmp_path / "in", *LINES))

    def broken() -> None:
        raise SystemExit("device gone")

    server.loop.engine.step = broken
    with pytest.raises(EngineDeadError, match="of 5 requests"):
        server.on_events(
            lambda: answer_all(server.gate, server.loop, requests, tmp_path / "out", lambda *_: None)
        )


def test_the_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in", *LINES[:2]), tmp_path / "out"
    options = ["--load-format", "dummy", "--num-blocks", "64", "--quiet"]
    main(["run-batch", str(model_folder), "-i", str(source), "-o", str(output), *options])
    assert {answer["status_code"] for answer in read(output).values()} == {200}
    assert f"2 of 2 requests were answered: {output}" in capsys.readouterr().out
    for arguments, message in (
        (["-i", str(source), "-o", str(source)], "another file"),
        (["-i", str(source), "-o", str(output)], "model.safetensors"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["run-batch", str(model_folder), *arguments])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_a_batch_with_errors_has_an_exit_code_of_its_own(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    options = [
        "--load-format",
        "dummy",
        "--num-blocks",
        "64",
        "--quiet",
        "-i",
        str(source),
        "-o",
        str(output),
    ]
    source.write_bytes(json.dumps(LINES[0]).encode() + b"\nno request\n" + json.dumps(LINES[3]).encode())
    with pytest.raises(SystemExit) as caught:
        main(["run-batch", str(model_folder), *options])
    assert caught.value.code == 4
    said = capsys.readouterr()
    assert f"1 of 3 requests were answered: {output}" in said.out
    assert f"2 of 3 requests failed; their lines in {output} say why" in said.err
    answers = {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}
    assert {name: (answer["response"] or {}).get("status_code") for name, answer in answers.items()} == {
        "a": 200,
        "d": 400,
        None: None,
    }
    # Without any request, no model is looked for.
    source.write_bytes(b"no request")
    with pytest.raises(SystemExit) as caught:
        main(["run-batch", str(tmp_path / "nowhere"), *options])
    assert caught.value.code == 4
    assert json.loads(output.read_text())["error"]["code"] == "invalid_json"


def test_what_a_bug_report_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-0123456789")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    main(["collect-env"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["OCTAVO_API_KEY"] == "(not shown)"
    assert lines["OCTAVO_BLOCK_SIZE"] == "32"
    assert {"system", "python", "memory", "torch", "octavo"} <= lines.keys()
