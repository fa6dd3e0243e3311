"""`octavo serve` as a process on loopback, and what the system says about it. Shared by all files here."""

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
# These files are scripts and tests: both find the tiny model and what benchmarks share.
sys.path += [str(ROOT / folder) for folder in ("tests/support", "benchmarks")]

from http_helpers import free_port  # noqa: E402
from tiny_chat import write_model  # noqa: E402

SMOLLM2 = "smollm2"
_SAMPLE = re.compile(r"^([\w:]+)(?:\{.*\})? (\S+)$", re.MULTILINE)
_FAILED = re.compile(r'^octavo:http_responses_total\{status="5\d\d"\} (\S+)$', re.MULTILINE)


class ServerProcess:
    """A server of its own, ready when the constructor returns; it is killed at the end of a `with` block.

    Attributes:
        port: where it listens on 127.0.0.1.
        process: the process.
    """

    def __init__(self, *options: str, model: str | None = None, script: Path | None = None) -> None:
        """Start a server.

        Args:
            options: further flags.
            model: its name or folder; None: the tiny model of random weights.
            script: a script to run in place of `octavo serve`; gets --port and the options.
        """
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-stress-")
        folder = Path(self._folder.name)
        command = [sys.executable, *self._program(model, script, folder), "--port", str(self.port), *options]
        self._errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            # Threads that wait for each other are slow beside neighbours, and the tiny model needs one.
            env={**os.environ, "PYTHONPATH": str(ROOT), **({} if model else {"OMP_NUM_THREADS": "1"})},
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._await_line()

    def _program(self, model: str | None, script: Path | None, folder: Path) -> list[str]:
        if script is not None:
            return [str(script)]
        if model is not None:
            return ["-m", "octavo", "serve", model]
        return ["-m", "octavo", "serve", str(write_model(folder)), "--load-format", "dummy"]

    def _await_line(self, seconds: float = 240.0) -> None:
        """Wait for the one line that says it is ready."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(seconds) else b""
        if b" at http://" not in line:
            errors = self.errors()
            self.__exit__()
            raise AssertionError(f"the server did not begin: {line!r} {errors}")

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def errors(self) -> str:
        """What it wrote to the standard error."""
        return Path(self._errors.name).read_text()

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Seconds of CPU so far, in user and in system mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def children(self) -> list[int]:
        """Process ids of its children."""
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(pid) for path in lists for pid in path.read_text().split()]

    def metrics(self) -> dict[str, float]:
        """Every metric without its labels; of several with one name the sum."""
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(self._metrics_text()):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def num_failed(self) -> int:
        """How many answers had a status of 500 or more."""
        return int(sum(float(number) for number in _FAILED.findall(self._metrics_text())))

    def _metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def leftovers(self, seconds: float = 60.0) -> dict[str, float]:
        """Wait until nothing runs; return what is left nevertheless, which is nothing in a sound server."""
        names = ("octavo:live_requests", "vllm:num_requests_waiting", "vllm:num_requests_running")
        left: dict[str, float] = {}

        def is_empty() -> bool:
            found = self.metrics()
            left.clear()
            left.update({name: found[name] for name in (*names, "octavo:kv_blocks_referenced")})
            return not any(left.values())

        wait_for(is_empty, seconds)
        return {name: value for name, value in left.items() if value}


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is true; False if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
