"""Output that cannot be written is no failure of a server, and SIGHUP ends it as SIGTERM does."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from http_helpers import PROGRAM, answers, eventually, free_port, start_process

TEXT = "/v1/completions"
LONG = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture
def start(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen, str]]]:
    """Start a server with options, its standard streams as a shell writes them; return it and its URL."""
    running: list[subprocess.Popen] = []

    def run(streams: str, *options: str, before: str = "") -> tuple[subprocess.Popen, str]:
        port = free_port()
        command = ["serve", str(model_folder), "--load-format=dummy", "--num-blocks=128", f"--port={port}"]
        shell = ["bash", "-c", f'{before} exec "$@" {streams}', "bash", sys.executable, "-c", PROGRAM]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        running.append(subprocess.Popen([*shell, *command, *options], cwd=tmp_path, env=environment))
        return running[-1], f"http://127.0.0.1:{port}"

    yield run
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("streams", "options"),
    [
        (">/dev/full 2>/dev/full", ("--access-log",)),
        ("> >(true)", ()),
        (">&- 2>&-", ()),
        (">/dev/full", ("--restart",)),
        pytest.param("> >(true)", ("--replicas=2",), marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written_ends_no_server(
    start: Callable[..., tuple[subprocess.Popen, str]], streams: str, options: tuple[str, ...]
) -> None:
    process, url = start(streams, *options)
    eventually(lambda: answers(f"{url}/ready", 200) or process.poll() is not None, 120, every_s=0.05)
    for _ in range(3):
        answer = httpx.post(url + TEXT, json={"prompt": [5], "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200
    if "--restart" in options:
        found = re.findall(
            r"^octavo:engine_restarts_total{.*} (\S+)$", httpx.get(f"{url}/metrics").text, re.M
        )
        assert found == ["0.0"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    "options", [(), ("--restart",), ("--replicas", "2")], ids=["alone", "restart", "replicas"]
)
def test_sighup_lets_requests_finish(model_folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    port = free_port()
    command = [
        "serve",
        str(model_folder),
        "--load-format",
        "dummy",
        "--num-blocks",
        "256",
        "--port",
        str(port),
    ]
    with start_process([*command, *options], tmp_path) as process:
        try:
            assert process.stdout is not None
            assert "ready after" in process.stdout.readline()
            (tmp_path / "slow").touch()
            url = f"http://127.0.0.1:{port}"
            with httpx.stream("POST", url + TEXT, json=LONG, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                # A terminal that closes may send it twice.
                process.send_signal(signal.SIGHUP)
                eventually(lambda: answers(f"{url}/ready", 503))
                process.send_signal(signal.SIGHUP)
                assert httpx.post(url + TEXT, json={"prompt": [5]}).status_code == 503
                (tmp_path / "slow").unlink()
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, "Traceback" in errors) == (0, False), errors
        finally:
            process.kill()


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--replicas=2",), marks=pytest.mark.slow)], ids=["alone", "replicas"]
)
def test_a_server_that_ignores_sighup_stays(
    start: Callable[..., tuple[subprocess.Popen, str]], options: tuple[str, ...]
) -> None:
    # As nohup does.
    process, url = start(">/dev/null", *options, before="trap '' HUP;")
    eventually(lambda: answers(f"{url}/ready", 200), 120, every_s=0.05)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    for _ in range(5):
        assert httpx.post(url + TEXT, json={"prompt": [5], "max_tokens": 2}, timeout=60).status_code == 200
    process.terminate()
    assert process.wait(60) == 0
