"""Waits for processes by what they do, not by a clock alone: on a busy machine everything takes longer."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
# A share of a processor: a process that only looks whether it may go on uses less.
_LEAST_SHARE = 0.02
_LOOK_S = 0.5


class Work(NamedTuple):
    """The activity of a process and its descendants.

    Attributes:
        seconds: how long they have worked, also those that ended and were waited for.
        is_ready: one of them runs, or waits for a processor or a disk.
    """

    seconds: float
    is_ready: bool


def work_of(pid: int) -> Work | None:
    """Return what a process and its descendants do; the thread that asks does not count as ready.

    None where the system does not tell (only Linux does), or there is no such process.
    """
    try:
        fields = _fields(_PROC / str(pid))
        tasks = list((_PROC / str(pid) / "task").iterdir())
        states = {_fields(task)[0] for task in tasks if task.name != str(threading.get_native_id())}
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return None
    works = [work for work in map(work_of, children) if work is not None]
    # utime, stime, and both of children that were waited for.
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    is_ready = bool(states & {b"R", b"D"}) or any(work.is_ready for work in works)
    return Work(own + sum(work.seconds for work in works), is_ready)


def _fields(folder: Path) -> list[bytes]:
    """Return the fields of a stat file from the state on."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()


class Patience:
    """Lasts while a process and its descendants work.

    Attributes:
        idle_s: seconds without work after which it ends: by the clock, where the system does not tell.
        busy_s: seconds of processor time after which it ends, too.
    """

    def __init__(self, pid: int, idle_s: float, busy_s: float) -> None:
        self.idle_s = idle_s
        self.busy_s = busy_s
        self._pid = pid
        work = work_of(pid)
        self._first = self._used = work.seconds if work else 0.0
        self._since = time.monotonic()

    def lasts(self) -> bool:
        """Look at the process again; False once it has stood still, or worked, for too long."""
        work, now = work_of(self._pid), time.monotonic()
        if work is None:
            return now - self._since < self.idle_s
        # Less than before: a descendant ended, and nobody waited for it.
        if work.is_ready or abs(work.seconds - self._used) >= _LEAST_SHARE * self.idle_s:
            self._used, self._since = work.seconds, now
        return now - self._since < self.idle_s and work.seconds - self._first < self.busy_s


def communicate(process: "subprocess.Popen[str]", idle_s: float, busy_s: float) -> tuple[str, str]:
    """Return what a process writes to its output and errors until it ends.

    Raises:
        TimeoutError: it stood still, or worked, for too long, and was killed.
    """
    patience = Patience(process.pid, idle_s, busy_s)
    while True:
        try:
            return process.communicate(timeout=min(_LOOK_S, idle_s))
        except subprocess.TimeoutExpired:
            if not patience.lasts():
                process.kill()
                raise TimeoutError(
                    f"it stood still for {idle_s:g} s, or took more than {busy_s:g} seconds of processor time"
                ) from None
