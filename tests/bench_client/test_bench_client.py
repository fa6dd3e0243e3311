"""The client against a scripted server: what it sends, what it sees, what it says of itself."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from octavo.bench_client.load import run_load
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.summary import summarise
from octavo.bench_client.workload import arrival_times
from octavo.errors import ConfigError, OctavoError


def figures_of(server: ScriptedServer, **fields: Any) -> dict[str, Any]:
    options = LoadOptions(base_url=server.url, **{"num_prompts": 6, **fields})
    return summarise(options, asyncio.run(run_load(options)))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_what_the_server_says(server: ScriptedServer, endpoint: Any) -> None:
    figures = figures_of(server, endpoint=endpoint, ignore_eos=True, input_len=(3, 5), output_len=(4,))
    assert (figures["completed"], figures["failed"], figures["errors"]) == (6, 0, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (42, 24)
    assert figures["output_throughput"] == pytest.approx(24 / figures["duration"])
    # Three events of an answer have text: a role, nothing and usage are no tokens.
    assert figures["tokens_per_event"] == pytest.approx(24 / 18)
    assert len(server.script.asked) == 6
    for asked in server.script.asked:
        assert asked["model"] == "scripted"
        assert asked["stream"]
        assert asked["stream_options"] == {"include_usage": True}
        assert asked["ignore_eos"]
        assert asked["max_tokens"] == 4
        assert asked["key"] is None
        if endpoint == "chat":
            assert 3 <= len(asked["messages"][0]["content"].split()) <= 5
        else:
            assert 3 <= len(asked["prompt"]) <= 5
            assert all(100 <= token_id < 10_000 for token_id in asked["prompt"])


def test_times(server: ScriptedServer) -> None:
    server.script.gap_s = 0.05
    figures = figures_of(server, num_prompts=2, goodput=("ttft:49", "tpot:40000"))
    # Events come after 50, 100, (150: without text) and 200 ms; later on a busy machine.
    assert figures["median_ttft_ms"] >= 50
    assert figures["median_e2el_ms"] >= 200
    assert figures["median_e2el_ms"] > figures["median_ttft_ms"]
    assert figures["max_itl_ms"] > figures["median_tpot_ms"] > 0
    assert figures["request_goodput"] == 0
    figures = figures_of(server, num_prompts=2, goodput=("ttft:40000", "tpot:40000", "e2el:90000"))
    assert figures["request_goodput"] == pytest.approx(2 / figures["duration"])


def test_requests_are_the_same_for_a_seed_and_share_prefixes(server: ScriptedServer) -> None:
    fields: dict[str, Any] = {"prefix_len": 8, "num_prefixes": 2, "input_len": (2, 9), "output_len": (1, 9)}
    figures_of(server, max_concurrency=1, **fields)
    figures_of(server, max_concurrency=1, **fields)
    figures_of(server, max_concurrency=1, seed=1, **fields)
    asked = [(one["prompt"], one["max_tokens"]) for one in server.script.asked]
    assert asked[:6] == asked[6:12] != asked[12:]
    prefixes = [tuple(prompt[:8]) for prompt, _ in asked[:6]]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3] == prefixes[5]
    assert len({tuple(prompt) for prompt, _ in asked[:6]}) == 6


def test_a_file_of_prompts(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
    figures_of(server, num_prompts=3, max_concurrency=1, prompts_file=str(path), output_len=(9,))
    asked = [(one["prompt"], one["max_tokens"]) for one in server.script.asked]
    assert asked == [("one", 9), ([1, 2], 3), ("one", 9)]
    for line, why in (
        ('{"prompt": "a", "max_tokens": 0}', "at least 1"),
        ('{"messages": [{}]}', 'expected "prompt"'),
        ('{"promt": "a"}', "promt"),
        ("", "no prompts"),
    ):
        path.write_text(line)
        with pytest.raises(ConfigError, match=why):
            figures_of(server, prompts_file=str(path))


def test_closed_loop(server: ScriptedServer) -> None:
    server.script.gap_s = 0.01
    figures = figures_of(server, num_prompts=9, max_concurrency=3)
    assert server.script.most_under_way == figures["max_concurrent_requests"] == 3
    assert figures["client"]["late_ms"]["max"] is None


def test_open_loop_keeps_its_times(server: ScriptedServer) -> None:
    figures = figures_of(server, num_prompts=20, request_rate=50.0, burstiness=4.0)
    assert figures["duration"] > 0.2
    assert 0 <= figures["client"]["late_ms"]["median"] < 1000


def test_a_client_that_is_late_says_so(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.bench_client import load

    send = load._Run._send

    async def slow(self: Any, prompt: Any, answer: Any) -> None:
        time.sleep(0.03)
        await send(self, prompt, answer)

    monkeypatch.setattr(load._Run, "_send", slow)
    figures = figures_of(server, num_prompts=10, request_rate=200.0)
    assert figures["client"]["late_ms"]["p99"] > 30
    assert any("sent requests" in warning for warning in figures["warnings"])


def test_errors_are_grouped(server: ScriptedServer) -> None:
    server.script.status = 400
    server.script.refusal = lambda number: (
        b'{"error": {"message": "too\\n long"}}' if number % 3 else b"<p>proxy</p>"
    )
    figures = figures_of(server)
    assert figures["errors"] == {"status 400: too long": 4, "status 400: <p>proxy</p>": 2}
    assert (figures["completed"], figures["failed"], figures["mean_ttft_ms"]) == (0, 6, None)
    with pytest.raises(ConfigError, match="warm-up request failed: status 400"):
        figures_of(server, warmup=1)


@pytest.mark.parametrize(
    ("tail", "texts", "error"),
    [
        (b'data: {"error": {"message": "no memory"}}\n\n', ["a", "b"], "in the stream: no memory"),
        (b"data: {]\n\n", ["a"], "DecodeError: "),
    ],
)
def test_errors_in_a_stream(server: ScriptedServer, tail: bytes, texts: list[str], error: str) -> None:
    server.script.tail, server.script.texts = tail, texts
    (found,) = figures_of(server)["errors"]
    assert found.startswith(error)


def test_a_stream_that_stops(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.script, "_events", lambda is_chat: [{"choices": [{"text": "a"}]}])
    server.script.tail = b"\n"
    assert figures_of(server)["errors"] == {"the stream ended early": 6}


def test_time_limit(server: ScriptedServer) -> None:
    server.script.gap_s = 5.0
    assert figures_of(server, timeout=0.2, num_prompts=2)["errors"] == {"no whole answer after 0.2 s": 2}


def test_servers_that_tell_less(server: ScriptedServer) -> None:
    enough = figures_of(server, ignore_eos=True, output_len=(4,))["warnings"]
    assert not any("shorter" in warning or "usage" in warning for warning in enough)
    assert "shorter than asked" in figures_of(server, ignore_eos=True, output_len=(5,))["warnings"][-1]
    server.script.usage = None
    figures = figures_of(server)
    assert "no usage" in figures["warnings"][-1]
    assert figures["total_output_tokens"] == 18


def test_keys(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    (tmp_path / "key").touch(mode=0o600)
    # As the server reads it.
    (tmp_path / "key").write_text("\ufeff# ours\r\n\r\nsk-file\r\nsk-other\r\n", newline="")
    figures_of(server, num_prompts=1)
    figures_of(server, num_prompts=1, api_key="sk-own, sk-other")
    figures_of(server, num_prompts=1, api_key_file=str(tmp_path / "key"))
    keys = [asked["key"] for asked in server.script.asked]
    assert keys == ["Bearer sk-environment", "Bearer sk-own", "Bearer sk-file"]
    with pytest.raises(ConfigError, match="cannot be read"):
        figures_of(server, api_key_file=str(tmp_path / "none"))
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"every user of this machine; run: chmod o-r"):
        figures_of(server, api_key_file=str(tmp_path / "key"))


def test_nobody_there() -> None:
    options = LoadOptions(base_url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1/v1/models"):
        asyncio.run(run_load(options))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"input_len": (5, 2)}, "input_len"),
        ({"output_len": (1, 2, 3)}, "output_len"),
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": float("nan")}, "burstiness"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"processes": 0}, "processes"),
        ({"processes": 3, "max_concurrency": 2}, "processes must be in \\[1, 2\\]"),
        ({"goodput": ("ttft=5",)}, "goodput"),
        ({"goodput": ("itl:5",)}, "goodput"),
        ({"vocab_size": 100}, "vocab_size"),
    ],
)
def test_refusals(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LoadOptions(**fields)


def test_the_command_needs_no_torch(server: ScriptedServer, tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "times.png"
    code = (
        "import sys\nfrom octavo.cli import main\ntry: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'transformers', 'octavo.engine.engine'} & set(sys.modules)"
    )
    flags = (
        f"--base-url {server.url}/v1 --num-prompts 4 --goodput ttft:1000 --json-file {path} --plot {picture}"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "bench", "serve", *flags.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures == json.loads(path.read_text())
    assert figures["completed"] == 4
    assert "api_key" not in figures["workload"]
    assert "time to first token" in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    server.script.status, server.script.refusal = 500, b"[red]not markup[/red]"
    ran = subprocess.run(
        [sys.executable, "-m", "octavo", "bench", "serve", *flags.split()], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "no request succeeded: status 500" in ran.stderr
    assert "[red]not markup[/red] " in ran.stdout
    assert json.loads(ran.stdout.splitlines()[-1])["failed"] == 4


def test_several_processes_are_one_client(server: ScriptedServer) -> None:
    server.script.gap_s = 0.02
    fields: dict[str, Any] = {"num_prompts": 11, "max_concurrency": 4, "input_len": (2, 9), "seed": 3}
    figures = figures_of(server, processes=3, **fields)
    assert (figures["completed"], figures["failed"], figures["errors"]) == (11, 0, {})
    assert server.script.most_under_way == figures["max_concurrent_requests"] == 4
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (77, 44)
    # At least three rounds of four events, on the clock that all of them share.
    assert figures["duration"] >= 3 * 4 * 0.02
    assert figures["median_ttft_ms"] >= 20
    assert figures["client"]["lag_ms"]["max"] >= 0
    spread = sorted(one["prompt"] for one in server.script.asked)
    server.script.asked.clear()
    figures_of(server, **fields)
    assert sorted(one["prompt"] for one in server.script.asked) == spread


def test_several_processes_keep_the_times(server: ScriptedServer) -> None:
    options = LoadOptions(base_url=server.url, num_prompts=9, request_rate=40.0, processes=2)
    load = asyncio.run(run_load(options))
    due_s = [answer.due_s - load.answers[0].due_s for answer in load.answers]
    times = arrival_times(options)
    assert due_s == pytest.approx([one - times[0] for one in times])
    assert all(answer.sent_s >= answer.due_s for answer in load.answers)


def test_a_process_that_ends_early(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.bench_client import load

    monkeypatch.setattr(load.sys, "executable", "false")
    with pytest.raises(OctavoError, match="exit status 1"):
        figures_of(server, processes=2)
