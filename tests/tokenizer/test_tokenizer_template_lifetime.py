"""The child process that renders templates lives as long as its parent, and belongs to it alone."""

import os
import signal
import time

import pytest
from template_scripts import is_gone, run_script, start_script


def wait_until_gone(pid: int, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return is_gone(pid)


def test_nothing_starts_before_the_first_use():
    run_script("assert SHARED.pid is None; ask('a'); assert SHARED.pid is not None")


def test_an_interrupt_of_the_whole_process_group_spares_the_child():
    run_script(
        """
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
seen = []
ask("a")
pid = SHARED.pid
os.killpg(0, signal.SIGINT)
time.sleep(0.2)
ask("b")
assert seen and SHARED.pid == pid
"""
    )


def test_no_child_is_left_unwaited_for():
    run_script(
        """
for _ in range(2):
    ask("a")
    ask(str(time.time()))
    assert os.waitpid(-1, os.WNOHANG) == (0, 0)
    try:
        ask_slow()
        raise SystemExit("expected an error")
    except ValueError:
        pass
    try:
        raise SystemExit(str(os.waitpid(-1, os.WNOHANG)))
    except ChildProcessError:
        pass
"""
    )


def test_the_child_ends_with_its_parent():
    pid = int(run_script("ask('a'); print(SHARED.pid)"))
    assert wait_until_gone(pid)


@pytest.mark.parametrize("doing", ["time.sleep(60)", "ask_slow()"])
def test_the_child_of_a_killed_parent_ends(doing):
    with start_script(f"ask('a'); print(SHARED.pid, flush=True); {doing}") as script:
        pid = int(script.stdout.readline())
        time.sleep(0.2)
        assert not is_gone(pid)
        script.kill()
    assert wait_until_gone(pid)


def test_the_child_of_a_killed_parent_ends_although_a_fork_of_it_lives():
    code = "ask('a'); pids = SHARED.pid, os.fork(); pids[1] and print(*pids, flush=True); time.sleep(60)"
    with start_script(code) as script:
        pid, fork = map(int, script.stdout.readline().split())
        script.kill()
        script.wait()
        try:
            assert wait_until_gone(pid)
            assert not is_gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_fork_starts_a_child_of_its_own():
    run_script(
        """
ask("a")
mine = SHARED.pid
fork = os.fork()
for i in range(100):
    ask(f"{fork} {i}")
if fork == 0:
    os._exit(0 if SHARED.pid != mine else 1)
assert os.waitpid(fork, 0)[1] == 0
ask("b")
assert SHARED.pid == mine
"""
    )


def test_a_fork_during_a_render_of_another_thread_does_not_hang():
    run_script(
        """
import warnings
warnings.simplefilter("ignore")
def attack():
    try:
        ask_slow()
    except ValueError:
        pass
ask("a")
thread = threading.Thread(target=attack)
thread.start()
time.sleep(0.3)
fork = os.fork()
if fork == 0:
    signal.alarm(20)
    ask("b")
    os._exit(0)
assert os.waitpid(fork, 0)[1] == 0
thread.join()
ask("c")
"""
    )


def test_a_parent_that_blocks_signals_still_limits_its_child():
    run_script(
        """
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF, signal.SIGTERM])
try:
    ask_slow()
except ValueError as error:
    assert "processor time" in str(error), error
ask("a")
os.kill(SHARED.pid, signal.SIGKILL)
time.sleep(0.1)
ask("b")
"""
    )
