"""The watchdog of a worker: it counts time in which it runs, and reports a long piece of work once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from octavo.server.loop.watchdog import Watchdog


def test_a_watchdog_counts_only_time_in_which_it_runs() -> None:
    """A process that SIGSTOP held for longer than the deadline has not overrun it when it goes on."""
    program = """
import os, signal, time
from octavo.server.loop.watchdog import Watchdog
overruns = []
watchdog = Watchdog(1.5, overruns.append)
watchdog.start()
watchdog.begin()
os.kill(os.getpid(), signal.SIGSTOP)
# Let the watchdog look.
time.sleep(0.3)
assert not overruns, overruns
print("going on", flush=True)
while not overruns:
    time.sleep(0.05)
time.sleep(0.3)
print("overruns", len(overruns), flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with child:
        assert child.stdout is not None
        # Until it has stopped itself, and then for longer than the deadline.
        os.waitpid(child.pid, os.WUNTRACED)
        time.sleep(2)
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.readline() == "going on\n"
        assert child.stdout.readline() == "overruns 1\n"


def test_a_watchdog_reports_a_long_piece_once_and_short_ones_never(capfd: pytest.CaptureFixture[str]) -> None:
    overruns: list[float] = []
    watchdog = Watchdog(0.2, overruns.append)
    watchdog.start()
    for _ in range(30):
        watchdog.begin()
        time.sleep(0.01)
        watchdog.end()
    assert not overruns
    for number in (1, 2):
        watchdog.begin()
        while len(overruns) < number:
            time.sleep(0.01)
        time.sleep(0.3)
        watchdog.end()
        time.sleep(0.05)
    watchdog.stop()
    assert len(overruns) == 2
    assert all(seconds > 0.2 for seconds in overruns)
    assert "test_a_watchdog_reports" in capfd.readouterr().err
