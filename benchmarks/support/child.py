"""A measurement in a fresh process of its own: it prints logs, and its figures as the last line of JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_BENCHMARKS,
        env={**os.environ, "PYTHONPATH": _python_path()},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        printed, _ = process.communicate()
    finally:
        _kill(process)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise ChildError(f"exit status {process.returncode} of {' '.join(command)}:\n{printed[-4000:]}")
    figures = json.loads(lines[-1])
    return {**figures, "process_ready_s": figures.pop("ready_at") - begun}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _python_path() -> str:
    """Where this process finds modules, from any working directory."""
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*given, str(package_folder().resolve().parent)])
