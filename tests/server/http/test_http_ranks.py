"""`octavo serve` on two ranks: it answers, and when a rank is gone it says so and ends."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from http_helpers import chat, eventually, free_port, start_process

CHAT = "/v1/chat/completions"


@pytest.fixture
def served(model_folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on two ranks and its URL."""
    command = ["serve", str(model_folder), "-tp", "2", "--device", "cpu"]
    command += ["--load-format", "dummy", "--num-blocks", "64", "--port", str(free_port())]
    process = start_process(command, tmp_path)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "is served at" in line, process.communicate()
    yield process, line.split(" is served at ")[1].split(",")[0]
    process.kill()
    process.communicate()


def rank_of(server: int) -> int:
    """Process id of the other rank."""
    for process in Path("/proc").glob("[0-9]*"):
        # Any process may end at any time.
        with suppress(FileNotFoundError, ProcessLookupError):
            is_rank = b"octavo.engine.ranks" in Path(process, "cmdline").read_bytes()
            if is_rank and f"PPid:\t{server}\n" in Path(process, "status").read_text():
                return int(process.name)
    raise AssertionError("there is no other rank")


def test_a_rank_that_is_killed_ends_streams_health_and_server(
    served: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = served
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post(CHAT, json=chat("Hi"))
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
        assert client.get("/health").status_code == 200
        (tmp_path / "slow").touch()
        body = chat("Hi", max_tokens=490, ignore_eos=True, stream=True)
        with client.stream("POST", CHAT, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            rank = rank_of(process.pid)
            killed = time.monotonic()
            os.kill(rank, signal.SIGKILL)
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert time.monotonic() - killed < 10, "the answer takes 20 s"
            rest = [line for line in lines if line]
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead"
    assert "rank 1 of 2 was killed by SIGKILL" in error["message"]
    assert process.wait(60) == 3
    assert "the engine died: rank 1 of 2 was killed by SIGKILL" in process.communicate()[1]
