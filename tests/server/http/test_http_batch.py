"""Batches by OpenAI's form: what is read, what is answered, and what is refused before anything runs."""

import json
from pathlib import Path

import pytest
from http_helpers import LiveServer, chat

from octavo.cli import main
from octavo.errors import EngineDeadError, PromptError
from octavo.server.batch import answer_all, read_batch

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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Hi", "line 3: expected a request of a batch"),
        ({**LINES[0], "custom_id": "a"}, "line 3: custom_id 'a' was there before"),
        ({**LINES[0], "custom_id": ""}, "line 3.*custom_id"),
        ({**LINES[0], "custom_id": "x", "url": "/metrics"}, r"line 3.*\$.url"),
        ({**LINES[0], "custom_id": "x", "method": "GET"}, r"line 3.*\$.method"),
        ({**LINES[0], "custom_id": "x", "extra": 1}, "line 3.*extra"),
        ({**LINES[0], "custom_id": "x", "body": {"prompt": "a", "stream": True}}, "line 3.*not streamed"),
    ],
)
def test_a_line_that_is_no_request_refuses_the_file(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_batch(write(tmp_path / "in", LINES[0], line))


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
        (["-i", str(output), "-o", str(source)], "line 1"),
        (["-i", str(source), "-o", str(output)], "model.safetensors"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["run-batch", str(model_folder), *arguments])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_what_a_bug_report_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-0123456789")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    main(["collect-env"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["OCTAVO_API_KEY"] == "(not shown)"
    assert lines["OCTAVO_BLOCK_SIZE"] == "32"
    assert {"system", "python", "memory", "torch", "octavo"} <= lines.keys()
