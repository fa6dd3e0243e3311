"""Ctrl-C, with real signals: exit code 130 and nothing printed, whatever the command is just doing."""

import os
import signal
import subprocess
import sys
import time

import pytest

from octavo.cli.interrupts import leave_on_interrupt, raise_on_interrupt

COMMAND = [sys.executable, "-m", "octavo", "generate", "Once", "--max-tokens", "400", "--ignore-eos"]
# From the first imports to the middle of the text: seconds.
MOMENTS = [0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.6, 1.0, 1.6, 2.5]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_ends_with_130(moment: float) -> None:
    # Python's own start is not ours: it tells when that is over.
    command = [COMMAND[0], "-X", "importtime", *COMMAND[1:]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split()[-1:] == [b"octavo.cli"]:
                break
        # From there it is microseconds to the first line of main.
        time.sleep(0.001 + moment)
        process.send_signal(signal.SIGINT)
        errors = [line for line in process.stderr if not line.startswith(b"import time:")]
        assert process.wait(timeout=30) == 130
    assert errors == []


def test_ctrl_c_after_the_answer_began_ends_with_130() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 130


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    """As in a shell's background job."""
    code = "import octavo.cli.interrupts as i, os, signal\ni.leave_on_interrupt()\nos.kill(os.getpid(), 2)"
    start = "import signal, subprocess, sys\nsignal.signal(2, signal.SIG_IGN)\n"
    start += f"sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    assert subprocess.run([sys.executable, "-c", start]).returncode == 0


def test_the_handler_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    leave_on_interrupt()
    try:
        signal.raise_signal(signal.SIGINT)
        assert exits == [130]
    finally:
        raise_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
