"""`octavo serve --restart`: an engine that dies has a successor in a new process."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
from http_helpers import eventually, free_port, start_process

TEXT = "/v1/completions"


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def start(model: Path, folder: Path, port: int) -> subprocess.Popen[str]:
    command = ["serve", str(model), "--load-format", "dummy"]
    command += ["--port", str(port), "--num-blocks", "128", "--restart", "--max-restarts", "1"]
    return start_process(command, folder)


def test_an_engine_that_dies_is_started_again_and_not_for_ever(model_folder: Path, tmp_path: Path) -> None:
    body = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True}
    port = free_port()
    # A connection for each request: the next one may be for another process.
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}", limits=httpx.Limits(max_keepalive_connections=0), timeout=30
    )
    with client, start(model_folder, tmp_path, port) as process:
        try:
            assert process.stdout is not None
            assert "is served at" in process.stdout.readline()
            (tmp_path / "slow").touch()
            with client.stream("POST", TEXT, json={**body, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                (tmp_path / "kill").touch()
                begun = time.monotonic()
                rest = [line for line in lines if line]
            assert time.monotonic() - begun < 10, "the answer takes 20 s"
            (tmp_path / "slow").unlink()
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead"
            # Until the next engine is ready, everybody is told so; nobody is turned away.
            assert client.get("/health").status_code == 503
            refused = client.post(TEXT, json=body)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            seen = set()
            while (found := client.get("/ready").status_code) != 200:
                seen.add(found)
                time.sleep(0.05)
            assert seen == {503}
            assert client.post(TEXT, json=body).status_code == 200
            assert 'octavo:engine_restarts_total{engine="0"' in client.get("/metrics").text
            (pid,) = children(process)
            os.kill(pid, signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 3
            assert "octavo: error: the engine died 2 times" in errors
            eventually(lambda: not Path(f"/proc/{pid}").exists())
        finally:
            process.kill()
