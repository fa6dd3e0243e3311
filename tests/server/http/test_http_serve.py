"""`octavo serve` as a process: what it says, how it ends, what it refuses to begin."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from http_helpers import answers, chat, eventually, free_port, start_process

from octavo.cli import main

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer sk-from-the-environment"}
LONG = chat("Hi", max_tokens=400, ignore_eos=True, stream=True)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers run."""
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(scope="module")
def start(model_folder: Path, folder: Path) -> Iterator[Start]:
    """Start a server."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = ["serve", str(model_folder), "--load-format", "dummy", "--num-blocks", "64", *arguments]
        running.append(start_process(command, folder, **environment))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """Where a server is, from the one line that it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "is served at" in line, process.communicate()
    return line.split(" is served at ")[1].split(",")[0]


@pytest.fixture(scope="module")
def served(start: Start) -> tuple[subprocess.Popen[str], str]:
    """A server with a key and its URL; the last test ends it."""
    options = ("--port", str(free_port()), "--shutdown-timeout", "60")
    process = start(*options, OCTAVO_API_KEY="sk-from-the-environment")
    return process, url_of(process)


def test_only_one_port_is_open_and_only_on_loopback(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=KEY).status_code == 200
    inodes = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        # The connections of the requests above may end meanwhile.
        with suppress(FileNotFoundError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    listening = [row[1] for row in rows if len(row) > 9 and row[3] == "0A" and row[9] in inodes]
    port = int(url.rsplit(":", 1)[1])
    assert listening == [f"0100007F:{port:04X}"]
    # The key is in no place that other users see, and the child that renders templates does not have it.
    assert "sk-from" not in Path(f"/proc/{process.pid}/cmdline").read_text()
    assert httpx.post(url + CHAT, json=chat("Hi"), headers=KEY).status_code == 200
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    pids = [pid for path in children for pid in path.read_text().split()]
    assert pids
    assert not any("sk-from" in Path(f"/proc/{pid}/environ").read_text() for pid in pids)


def test_sigterm_lets_requests_finish(served: tuple[subprocess.Popen[str], str], folder: Path) -> None:
    process, url = served
    slow = folder / "slow"
    slow.touch()
    with (
        httpx.Client(base_url=url, headers=KEY) as client,
        client.stream("POST", CHAT, json=LONG, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: answers(f"{url}/ready", 503))
        refused = httpx.post(url + CHAT, json=chat("Hi"), headers=KEY)
        slow.unlink()
        rest = [line for line in lines if line]
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output == ""
    assert errors == ""


def test_a_unix_socket_and_a_shutdown_timeout_of_0_that_aborts(start: Start, folder: Path) -> None:
    path = folder / "s"
    process = start("--uds", str(path), "--shutdown-timeout", "0")
    assert url_of(process) == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        assert client.post(CHAT, json=chat("Hi")).status_code == 200
        (folder / "slow").touch()
        with client.stream("POST", CHAT, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        (folder / "slow").unlink()
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "abort"
    assert process.wait(60) == 0
    assert time.monotonic() - begun < 15, "the answer takes 20 s"


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    options = ("--port", str(free_port()), "--quiet")
    process = start_process(["serve", str(tmp_path / "nowhere"), *options], tmp_path)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.count("\n")) == (2, "", 1)
    assert "nowhere" in errors


# Written when the process ends: before the interpreter is taken apart, and while it is.
ENDS = """
import atexit, os, sys

class Last:
    def __del__(self, note=os.mkdir):
        note("{folder}/apart")

sys.last = Last()
atexit.register(os.mkdir, "{folder}/left")
"""


def test_it_leaves_without_taking_the_interpreter_apart(start: Start, tmp_path: Path) -> None:
    """Threads of the HTTP server's library would abort the process if they called Python meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(ENDS.format(folder=tmp_path))
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    process = start("--port", str(free_port()), PYTHONPATH=path)
    url_of(process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert (tmp_path / "left").exists()
    assert not (tmp_path / "apart").exists()


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


def test_what_it_refuses_to_begin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "clients need a key" in fails(capsys, "--host", "0.0.0.0")
    assert "OCTAVO_API_KEY" in fails(capsys, "--api-key", "sk-0123456789")
    assert "port must be a number in" in fails(capsys, "--port", "70000")
    assert "uds nowhere/socket cannot be bound: No such" in fails(capsys, "--uds", "nowhere/socket")
    assert "AF_UNIX path too long" in fails(capsys, "--uds", "a" * 200)
    assert "together" in fails(capsys, "--ssl-certfile", "a.pem")
    pair = ("--ssl-certfile", "a.pem", "--ssl-keyfile", "key.pem")
    assert "ssl_certfile a.pem is no file" in fails(capsys, *pair)
    for name in ("a.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    assert "cannot be used" in fails(capsys, *pair)
    assert "cannot be read" in fails(capsys, "--api-key-file", str(tmp_path / "nowhere"))
    assert "did you mean" in fails(capsys, "--max-num-queued-request", "5").lower()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be bound" in fails(capsys, "--port", str(taken.getsockname()[1]))
    (tmp_path / "octavo.toml").write_text('[serve]\nhost = "0.0.0.0"\n')
    assert "[serve] sets host, which the file of a working directory may not" in fails(capsys)
    (tmp_path / "octavo.toml").unlink()
    assert "clients need a key" in fails(capsys, "--host", "0.0.0.0")
