"""Waits for processes by what they do, not by a clock alone: on a busy machine everything takes longer."""

import os
import subprocess
import time
from pathlib import Path

_PROC = Path("/proc")
# Of a processor. A process that works gets more, however busy the machine; one that only looks whether it may
# go on uses less.
_LEAST_SHARE = 0.02
_LOOK_S = 0.5


def processor_seconds(pid: int) -> float | None:
    """Return the seconds that a process and its descendants worked, also those that were waited for.

    None where the system does not tell (only Linux does), or there is no such process.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        children = [
            int(child)
            for task in (_PROC / str(pid) / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return None
    # utime, stime, and both of children that were waited for.
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(child) or 0.0 for child in children)


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
        self._first = self._used = processor_seconds(pid) or 0.0
        self._since = time.monotonic()

    def lasts(self) -> bool:
        """Look at the process again; False once it has stood still, or worked, for too long."""
        used, now = processor_seconds(self._pid), time.monotonic()
        # Less than before: a descendant ended, and nobody waited for it.
        if used is not None and abs(used - self._used) >= _LEAST_SHARE * self.idle_s:
            self._used, self._since = used, now
        return now - self._since < self.idle_s and (used or 0.0) - self._first < self.busy_s


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
