"""A measurement in a fresh process of its own: it prints logs, and its figures as the last line of JSON.

The figures go to standard error at once: whatever ends a script later, what it has measured is known.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .common import package_folder

_BENCHMARKS = Path(__file__).parents[1]


class ChildError(RuntimeError):
    """A process ended without figures."""


def run_child(arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run Python with the arguments, in the folder of benchmarks; its standard error goes where ours does.

    Args:
        arguments: of Python.
        limit_s: seconds after which the process and all that it started are killed; they are too when it
            has ended.

    Returns:
        The figures, and process_ready_s: from the start of the process to ready_at (time.time()), which the
        figures must have and which is taken out.

    Raises:
        ChildError: the process printed no JSON object.
    """
    begun = time.time()
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    # Into a file: of a pipe, whoever the process leaves behind would keep the end open.
    with tempfile.TemporaryFile("w+") as output, _sigterm_raises():
        process = subprocess.Popen(
            command, stdout=output, cwd=_BENCHMARKS, env=environment, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(process)
        output.seek(0)
        printed = output.read()
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise ChildError(f"exit status {process.returncode} of {' '.join(command)}:\n{printed[-4000:]}")
    print(lines[-1], file=sys.stderr, flush=True)
    figures = json.loads(lines[-1])
    ready_at = figures.pop("ready_at")
    return {**figures, "process_ready_s": ready_at - begun}


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that the child, which holds a GPU's memory, ends too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those it started, and wait a moment until their memory on the GPU is free."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def python_path() -> str:
    """Where this process finds modules, from any working directory."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*given, str(package_folder().resolve().parent)])
