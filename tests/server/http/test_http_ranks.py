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
from http_helpers import answers, chat, eventually, free_port, start_process

CHAT = "/v1/chat/completions"
HOOK = Path(__file__).parents[2] / "parallel" / "short_of_memory"


@pytest.fixture
def served(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on two ranks and its URL; a parameter is a further flag."""
    command = ["serve", str(model_folder), "-tp", "2", "--device", "cpu"]
    command += ["--load-format", "dummy", "--num-blocks", "64", "--port", str(free_port())]
    command += [request.param] if hasattr(request, "param") else []
    # The other rank finds no memory once this file exists.
    environment = {"PYTHONPATH": f"{HOOK}:{os.getcwd()}", "SHORT_OF_MEMORY": str(tmp_path / "now")}
    process = start_process(command, tmp_path, **environment)
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


def stop_for_a_while(client: httpx.Client, rank: int) -> None:
    """Stop a rank: health is red soon, and green when the rank goes on."""
    os.kill(rank, signal.SIGSTOP)
    stopped = time.monotonic()
    eventually(lambda: client.get("/health").status_code == 503)
    assert time.monotonic() - stopped < 5, "0.8 s, and what a busy machine adds"
    assert client.get("/ready").json()["status"] == "stalled"
    os.kill(rank, signal.SIGCONT)
    eventually(lambda: client.get("/health").status_code == 200)


def test_health_is_red_while_a_rank_is_stopped_and_a_rank_that_is_killed_ends_all(
    served: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = served
    with httpx.Client(base_url=url, timeout=60) as client:
        stop_for_a_while(client, rank_of(process.pid))
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
            eventually(lambda: answers(f"{url}/health", 503))
            assert time.monotonic() - killed < 10, "the answer takes 20 s"
            rest = [line for line in lines if line]
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead"
    assert "rank 1 of 2 was killed by SIGKILL" in error["message"]
    assert process.wait(60) == 3
    assert "the engine died: rank 1 of 2 was killed by SIGKILL" in process.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("served", ["--restart"], indirect=True)
def test_a_rank_without_memory_ends_its_streams_and_the_server_starts_again(
    served: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = served
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.post(CHAT, json=chat("Hi", max_tokens=2)).status_code == 200
        (tmp_path / "now").touch()
        with client.stream("POST", CHAT, json=chat("Hi", max_tokens=490, stream=True)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert "rank 1 of 2 failed: OutOfMemoryError('Tried to allocate 7 GiB" in error["message"]
        eventually(lambda: client.get("/health").status_code == 503)
        eventually(lambda: client.get("/ready").status_code == 200)
        assert client.post(CHAT, json=chat("Hi", max_tokens=2)).status_code == 200
    assert process.poll() is None
