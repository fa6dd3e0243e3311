"""The child process that renders templates: shared by threads, replaced when it fails or is interrupted."""

import gc
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from template_scripts import SLOW, is_gone

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate, template_process
from octavo.tokenizer.template_process import SHARED, TemplateProcess, TextCache

GOOD = ChatTemplate("{{ messages[0].content }}!")
_texts = iter(range(10**9))


def ask(text: str | None = None) -> None:
    """Render a text, by default one that no cache has, and check the result."""
    text = f"text {next(_texts)}" if text is None else text
    assert GOOD.render([{"role": "user", "content": text}]) == f"{text}!"


def ask_slow() -> None:
    ChatTemplate(SLOW).render([{"role": "user", "content": "x"}])


def test_one_child_serves_all_templates():
    ask()
    pid = SHARED.pid
    for i in range(20):
        assert ChatTemplate(f"{i} {{{{ messages[0].content }}}}").render(
            [{"role": "user", "content": "x"}]
        ) == (f"{i} x")
    assert SHARED.pid == pid


def test_a_refusal_does_not_cost_the_child():
    ask()
    pid = SHARED.pid
    for source in ("{{ raise_exception('no') }}", "{{ 1 + }}", "{{ nothing.at.all }}"):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])
    ask()
    assert SHARED.pid == pid


def test_equal_requests_are_rendered_once():
    ask("again")
    SHARED.close()
    ask("again")
    assert SHARED.pid is None
    ask("another")
    assert SHARED.pid is not None


def test_threads_get_their_own_texts():
    before = threading.active_count()

    def work(thread: int) -> None:
        for i in range(30):
            ask(f"thread {thread}: {'x' * random.randrange(1000)} {i}")
            if i == 10 and thread % 4 == 0:
                with pytest.raises(ChatTemplateError):
                    ChatTemplate("{{ nothing.at.all }}").render([{"role": "user", "content": "x"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert threading.active_count() == before


def test_threads_survive_each_others_templates():
    def attack(_: int) -> None:
        with pytest.raises(ChatTemplateError, match="processor time"):
            ask_slow()

    def work(_: int) -> None:
        for _ in range(20):
            ask()

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(attack if i == 1 else work, i) for i in range(4)]
        for future in futures:
            future.result()


def interrupt(seconds: float) -> threading.Timer:
    """Send this process a real SIGINT soon, as Ctrl-C does."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupt_during_a_render_leaves_no_stale_reply():
    ask()
    pid = SHARED.pid
    timer = interrupt(0.3)
    with pytest.raises(KeyboardInterrupt):
        ask_slow()
    timer.join()
    assert SHARED.pid is None
    assert is_gone(pid)
    ask()


# an interrupt inside the standard library's own calls may leave a socket or a child to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_time_leave_no_stale_reply():
    """Of large texts, so that they come while a child starts and while texts are sent, made and received."""
    num_interrupted = 0
    for i in range(20):
        if i % 2:
            SHARED.close()
        timer = None
        try:
            timer = interrupt(random.random() * (0.1 if i % 2 else 0.03))
            end = time.monotonic() + 5
            while time.monotonic() < end:
                ask(f"{next(_texts)} " + "x" * 500_000)
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            if timer is not None:
                timer.join()
        ask()
    # Here, where it is no error, not in a later test.
    gc.collect()
    assert num_interrupted == 20


def test_a_child_killed_while_idle_is_replaced():
    ask()
    pid = SHARED.pid
    os.kill(pid, signal.SIGKILL)
    ask()
    assert SHARED.pid not in (None, pid)


def test_a_child_killed_during_a_render_is_replaced():
    source = "{% for i in range(4) %}{% set x = range(99999)|sort|list %}{% endfor %}done"
    ask()
    pid = SHARED.pid
    timer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
    timer.start()
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == "done"
    timer.join()
    assert SHARED.pid not in (None, pid)
    ask()


def test_a_child_that_gets_no_processor_time_is_given_up(monkeypatch):
    monkeypatch.setattr(template_process, "WALL_SECONDS", 0.3)
    SHARED.close()
    ask()
    pid = SHARED.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match=r"at most 0\.3 s"):
        ask()
    assert is_gone(pid)
    ask()
    os.kill(SHARED.pid, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match=r"at most 0\.3 s"):
        ask("x" * 2_000_000)
    SHARED.close()


def test_what_a_template_leaves_in_memory_does_not_fail_the_next():
    # Not a constant, which Jinja would write into the code that it compiles, for most of a test's time.
    source = "{% set n = 9000000 %}{% set ns = namespace() %}{% set ns.x = ns %}{% set ns.y = 'a' * n %}ok"
    for i in range(120):
        assert ChatTemplate(f"{source} {i}").render([{"role": "user", "content": "x"}]) == f"ok {i}"


@pytest.mark.parametrize(
    ("executable", "said"),
    [("/nowhere/python", "No such file"), ("/bin/false", "process ended; this command.*/bin/false -P")],
)
def test_a_child_that_does_not_start_is_a_typed_error(monkeypatch, executable, said):
    monkeypatch.setattr(sys, "executable", executable)
    process = TemplateProcess()
    with pytest.raises(ChatTemplateError, match=said):
        process.render(b'{"source": "x", "context": {}, "fuel": 9}')
    assert process.pid is None


def test_the_cache_drops_what_was_used_least_recently():
    cache = TextCache(4000)
    for i in range(10):
        cache.put(b"%d" % i, "x" * 800)
        assert cache.get(b"0") == "x" * 800
    assert [i for i in range(10) if cache.get(b"%d" % i)] == [0, 7, 8, 9]
    cache.put(b"large", "x" * 2000)
    assert cache.get(b"large") is None
    assert cache.get(b"0") is not None
