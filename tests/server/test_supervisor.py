"""The parent of `octavo serve --restart`, over children that serve nothing: it knows nothing of engines."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig

# What a child does comes as its words: say one report each, then sleep until a signal comes.
PROGRAM = """
import os, signal, sys, threading
from octavo.errors import EngineDeadError
from octavo.server.config import ServerConfig
from octavo.server.supervisor import DYING, LISTENING, READY, supervise
place, max_restarts, window_s, *lives = sys.argv[1:]
where = {"port": int(place)} if place.isdigit() else {"uds": place}
try:
    child = supervise(
        ServerConfig(**where, max_restarts=int(max_restarts), restart_window_s=float(window_s))
    )
except EngineDeadError as error:
    sys.exit(str(error))
assert "torch" not in sys.modules and threading.active_count() == 1
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
words = lives[min(child.num_restarts, len(lives) - 1)].split()
for word in words:
    if not word.isdigit():
        child.tell({"listening": LISTENING, "ready": READY, "dying": DYING}[word])
# Only now, so that whoever reads it may kill a child that has said everything.
print(os.getpid(), child.num_restarts, flush=True)
if words and words[-1].isdigit():
    os._exit(int(words[-1]))
signal.pause()
"""
Start = Callable[..., "Parent"]


class Parent:
    """A supervising process, and what its children print."""

    def __init__(
        self, *lives: str, max_restarts: int = 3, window_s: float = 60.0, uds: Path | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            *map(str, (uds or self.port, max_restarts, window_s)),
            *lives,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        )

    def child(self) -> tuple[int, int]:
        """Return the next child's process id and how many came before it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        pid, num_restarts = line.split()
        return int(pid), int(num_restarts)

    def status(self) -> int | None:
        """Return what the stand-in answers; None if nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
        except ConnectionRefusedError:
            return None
        except ConnectionResetError:
            # It stopped listening just now.
            return self.status()
        finally:
            connection.close()
        assert answer.headers["retry-after"] == "5"
        return answer.status

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    parents: list[Parent] = []

    def run(*lives: str, **options: Any) -> Parent:
        parents.append(Parent(*lives, **options))
        return parents[-1]

    yield run
    for parent in parents:
        parent.process.kill()
        parent.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_child_that_is_killed_has_a_successor_and_somebody_answers_meanwhile(start: Start) -> None:
    parent = start("ready", "ready", "listening ready")
    first, _ = parent.child()
    assert parent.status() is None
    os.kill(first, signal.SIGKILL)
    second, num_restarts = parent.child()
    assert num_restarts == 1
    # It does not listen yet.
    assert parent.status() == 503
    os.kill(second, signal.SIGSEGV)
    third, num_restarts = parent.child()
    assert num_restarts == 2
    until(lambda: parent.status() is None)
    parent.process.send_signal(signal.SIGTERM)
    assert parent.wait()[0] == 0
    assert is_gone(third)


def test_a_child_that_dies_is_stood_in_for_at_once(start: Start) -> None:
    parent = start("listening ready dying")
    parent.child()
    until(lambda: parent.status() == 503)
    parent.process.send_signal(signal.SIGTERM)
    assert parent.wait()[0] == 0
    assert parent.status() is None


def test_a_path_that_a_killed_child_leaves_behind_is_free_again(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    parent = start("ready", uds=path)
    pid, _ = parent.child()
    path.touch()
    os.kill(pid, signal.SIGKILL)
    assert parent.child()[1] == 1
    assert not path.exists()


def test_too_many_deaths_are_the_end(start: Start) -> None:
    parent = start("ready 3", max_restarts=2)
    code, errors = parent.wait()
    assert code == 1
    assert "restart 2 of 2" in errors
    assert "the engine died 3 times within 60 s" in errors
    assert parent.status() is None


def test_deaths_are_forgotten_in_time(start: Start) -> None:
    parent = start("ready 3", "ready 3", "ready 3", "ready", max_restarts=1, window_s=0.001)
    assert [parent.child()[1] for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("life", "code"), [("2", 2), ("ready 0", 0)])
def test_what_is_no_death_of_an_engine_ends_the_parent_too(start: Start, life: str, code: int) -> None:
    """A first child that could not load would not be better the second time; one that ends well has to."""
    assert start(life).wait()[0] == code


def test_a_parent_that_is_killed_takes_its_child_along(start: Start) -> None:
    parent = start("listening ready")
    pid, _ = parent.child()
    parent.process.kill()
    until(lambda: is_gone(pid))


def test_bounds_of_restarts() -> None:
    for options in ({"max_restarts": -1}, {"restart_window_s": 0.0}, {"max_restarts": "5"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ServerConfig(**options)  # type: ignore[arg-type]
