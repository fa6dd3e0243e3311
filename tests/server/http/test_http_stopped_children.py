"""Children that somebody stops or kills: the answer is "try again", and the next one has a new child."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from http_helpers import LiveServer, chat, eventually

from octavo.server.reading import processes
from octavo.tokenizer import template_process
from octavo.tokenizer.template_process import SHARED

NUMBERS = itertools.count()
CHAT, MESSAGES, TOKENIZE = "/v1/chat/completions", "/v1/messages", "/tokenize"
LONG = b" " * processes.LONG_BYTES
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def server(serve_tiny: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    SHARED.close()
    monkeypatch.setattr(template_process, "WALL_SECONDS", 0.5)
    yield serve_tiny()
    SHARED.close()


def ask(server: LiveServer, path: str, text: str, *, long: bool = False) -> httpx.Response:
    """Ask with a new text, as texts are rendered once."""
    text = f"{text} {next(NUMBERS)}"
    body = chat(text) if path != TOKENIZE else {"messages": [{"role": "user", "content": text}]}
    content = json.dumps({**body, "max_tokens": 2} if path != TOKENIZE else body).encode() + LONG * long
    return server.http.post(path, content=content, headers={"Content-Type": "application/json"})


def assert_try_again(answer: httpx.Response) -> None:
    # Anthropic's clients know an overload by a status of its own.
    assert answer.status_code in (503, 529), answer.text
    assert (answer.status_code == 529) == ("overloaded_error" in answer.text)
    assert int(answer.headers["retry-after"]) >= 1


def children_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, TOKENIZE])
def test_a_stopped_child_for_templates_is_503(server: LiveServer, path: str) -> None:
    # With all the time that it may need at first.
    eventually(lambda: ask(server, path, "first").status_code == 200)
    assert SHARED.pid is not None
    os.kill(SHARED.pid, signal.SIGSTOP)
    assert_try_again(ask(server, path, "second"))
    eventually(lambda: ask(server, path, "second").status_code == 200)


def test_a_child_for_templates_that_is_killed_again_and_again_is_503(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "WALL_SECONDS", 60.0)
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.001):
            if pid := SHARED.pid:
                os.kill(pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        # Each of them reads for longer than a child lives.
        assert_try_again(ask(server, TOKENIZE, "a" * 20_000))
    finally:
        is_over.set()
        killing.join()
    assert ask(server, TOKENIZE, "a").status_code == 200


def test_a_child_for_templates_that_does_not_start_is_503(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        assert_try_again(ask(server, CHAT, "first"))
    eventually(lambda: ask(server, CHAT, "first").status_code == 200)


def test_a_template_that_takes_all_its_time_is_still_400(
    serve_template: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve_template(ENDLESS)
    # Less than a template may use, and more than a busy machine gives it in that time.
    monkeypatch.setattr(template_process, "OWN_SECONDS", 0.01)
    for long in (False, True):
        answer = ask(server, CHAT, "first", long=long)
        assert (answer.status_code, "retry-after" in answer.headers) == (400, False), answer.text


def test_a_stopped_child_that_reads_long_bodies_is_503(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WALL_S", 2.0)
    eventually(lambda: ask(server, CHAT, "first", long=True).status_code == 200)
    (pid,) = server.gate.context._reading.pids
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert_try_again(ask(server, CHAT, "second", long=True))
    eventually(lambda: ask(server, CHAT, "second", long=True).status_code == 200)


def test_a_stopped_child_of_the_one_that_reads_long_bodies_is_503(server: LiveServer) -> None:
    eventually(lambda: ask(server, CHAT, "first", long=True).status_code == 200)
    (pid,) = server.gate.context._reading.pids
    assert pid is not None
    (renderer,) = children_of(pid)
    os.kill(renderer, signal.SIGSTOP)
    assert_try_again(ask(server, CHAT, "second", long=True))
    eventually(lambda: ask(server, CHAT, "second", long=True).status_code == 200)
