"""Servers in processes of their own, and load on them by the client of `octavo bench serve`."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.bench_client.load import run_load
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.summary import summarise
from octavo.errors import ConfigError

from .child import python_path

Figures = dict[str, Any]
_BENCHMARKS = Path(__file__).parents[1]
_POLL_S = 0.5


class ServerError(RuntimeError):
    """A server did not come up."""


class ServerProcess:
    """A server with OpenAI's API; a context manager that ends it and all that it started.

    Attributes:
        url: where it listens.
        ready_s: from its start to its first answer.
    """

    def __init__(self, command: Sequence[str], port: int, limit_s: float) -> None:
        """Prepare.

        Args:
            command: Python's arguments, or a command whose first word is an absolute path.
            port: where the command makes it listen.
            limit_s: seconds until it must answer.
        """
        self._command = list(command) if command[0].startswith("/") else [sys.executable, *command]
        self._limit_s = limit_s
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s = 0.0

    def __enter__(self) -> "ServerProcess":
        self._log = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONPATH": python_path()}
        begun = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=self._log,
            cwd=_BENCHMARKS,
            env=environment,
            start_new_session=True,
        )
        try:
            self._await_answer(begun + self._limit_s)
        except BaseException:
            self.__exit__()
            raise
        self.ready_s = time.monotonic() - begun
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def load(self, **fields: Any) -> Figures:
        """Put a load on it; fields are those of LoadOptions."""
        options = LoadOptions(base_url=self.url, **fields)
        return summarise(options, asyncio.run(run_load(options)))

    def _await_answer(self, deadline: float) -> None:
        while True:
            try:
                figures = self.load(num_prompts=1, input_len=(4,), output_len=(1,), prompt_kind="words")
                if figures["completed"]:
                    return
                why = str(figures["errors"])
            except ConfigError as error:
                why = str(error)
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise ServerError(f"{' '.join(self._command)}: {why}\n{self._log.read()[-4000:]}")
            time.sleep(_POLL_S)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
