"""Whoever waits for a process waits while it works, and no longer than it stands still."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import patience as octavo_patience
from octavo.attention.cpu.c_calls import ATTENTION
from octavo.child_process import ChildProcess
from octavo.kernels.c import compiler as compiling
from octavo.kernels.c.compiler import KernelUnavailableError, Library
from octavo.patience import Patience, communicate, work_of

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux tells what processes use"
)

WORK = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
# By a child of a child, as a compiler's driver has it.
THROUGH_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


def start(code: str) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)


@pytest.mark.parametrize("form", ["{}", THROUGH_A_CHILD], ids=["itself", "a child"])
def test_what_works_is_waited_for(form: str) -> None:
    """It takes several times as long as it may stand still."""
    code = WORK.format(2) + "print('done')"
    with start(code if form == "{}" else form.format(code)) as process:
        assert communicate(process, idle_s=0.8, busy_s=60)[0] == "done\n"


def test_what_stands_still_is_ended() -> None:
    with start("import time; time.sleep(600)") as process:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="it stood still"):
            communicate(process, idle_s=0.3, busy_s=60)
    assert time.monotonic() - begun < 300
    assert process.returncode < 0


def test_what_only_looks_around_stands_still() -> None:
    with start("import time\nwhile True: time.sleep(0.05)") as process, pytest.raises(TimeoutError):
        communicate(process, idle_s=2, busy_s=60)


def test_what_never_ends_is_ended() -> None:
    with (
        start(WORK.format(600)) as process,
        pytest.raises(TimeoutError, match="seconds of processor time"),
    ):
        communicate(process, idle_s=60, busy_s=0.5)


def test_the_time_of_ended_children_counts() -> None:
    before = work_of(os.getpid())
    subprocess.run([sys.executable, "-c", WORK.format(0.3)], check=True)
    after = work_of(os.getpid())
    assert before is not None
    assert after is not None
    assert after.seconds - before.seconds >= 0.3
    assert work_of(2**22 + 1) is None


def test_whoever_waits_for_a_processor_is_ready() -> None:
    with (
        start(THROUGH_A_CHILD.format(WORK.format(600))) as process,
        start("import time; time.sleep(600)") as still,
    ):
        while not (work := work_of(process.pid)) or not work.is_ready or work.seconds < 0.5:
            time.sleep(0.02)
        while (work := work_of(still.pid)) and work.is_ready:
            time.sleep(0.02)
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        still.kill()


def test_where_the_system_does_not_tell_the_clock_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(octavo_patience, "_PROC", tmp_path)
    patience = Patience(os.getpid(), idle_s=0.2, busy_s=60)
    assert patience.lasts()
    time.sleep(0.25)
    assert not patience.lasts()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Let a script be the compiler that kernels are compiled with, for the first time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(code: str) -> None:
        path = tmp_path / "compiler"
        real = os.environ.get("CC", "cc")
        path.write_text(
            f"#!{sys.executable}\nimport os, sys\n{code}\nos.execvp({real!r}, [{real!r}, *sys.argv[1:]])\n"
        )
        path.chmod(0o700)
        monkeypatch.setenv("CC", str(path))

    return make


def test_a_slow_compiler_is_waited_for(compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling, "_IDLE_S", 0.8)
    compiler(WORK.format(1.2))
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    assert compiling.load_library(Library("one", (tmp_path / "one.c",), ())).one() == 1


def test_a_compiler_that_stands_still_is_an_error(compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_IDLE_S", 0.5)
    compiler("import time; time.sleep(600)")
    with pytest.raises(KernelUnavailableError, match=r"the C compiler failed: .*it stood still"):
        compiling.load_library(ATTENTION)


CHILD = """
import os, struct, sys, time
{}
os.write(0, struct.pack("!QQ", 0, 2) + b"ok")
time.sleep(600)
"""


def test_a_child_process_that_starts_slowly_is_waited_for() -> None:
    child = ChildProcess([sys.executable, "-c", CHILD.format(WORK.format(2))], start_s=1, wall_s=1)
    assert child.stop() == -9


def test_a_child_process_that_never_starts_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"], start_s=0.5, wall_s=1)


TESTS = """
import subprocess, sys, time, pytest
WORK = {work!r}
@pytest.fixture(scope="module")
def compiled():
    subprocess.run([sys.executable, "-c", WORK.format(2)], check=True)
def test_works_in_a_fixtures_child(compiled): pass
@pytest.mark.timeout(1, method="thread")
def test_works_with_a_thread_that_watches(): exec(WORK.format(2))
def test_stands_still(): time.sleep(600)
"""


def test_tests_are_waited_for_while_they_work(tmp_path: Path) -> None:
    """As those that compile, under load: by a clock they would end in errors after a second."""
    (tmp_path / "test_some.py").write_text(TESTS.format(work=WORK))
    here = Path(__file__).parent
    # The clock's own limit would come soon, as the others do.
    patient = (here / "conftest.py").read_text() + "\npatience._MOST = 10**6\n"
    (tmp_path / "conftest.py").write_text(patient)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=1",
        str(tmp_path),
    ]
    paths = os.pathsep.join([str(here / "support"), str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    assert re.search(r"1 failed, 2 passed", done.stdout), done.stdout + done.stderr
    assert "FAILED test_some.py::test_stands_still - Failed: Timeout" in done.stdout
