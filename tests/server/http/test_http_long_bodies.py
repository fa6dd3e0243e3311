"""Long bodies, which another process reads: the same answers, errors and limits."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from http_helpers import LiveServer, chat, eventually
from tool_cases import NAMED, TOOL

from octavo.server.reading import processes
from octavo.server.reading.processes import LONG_BYTES, ReadingProcesses

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
LONG = b" " * LONG_BYTES
NEW = re.compile(r'"(?:content|text|delta|arguments)":"((?:[^"\\]|\\.)*)"')
USED = re.compile(r'"(?:finish_reason|stop_reason|status)":"\w+"|"usage":\{[^}]*\}')
ID = {"X-Request-Id": "the-same"}
HELLO = [{"role": "user", "content": "Hello"}]
HUGE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 10**400}}}
REGEX = {"structured_outputs": {"regex": "[ab]{3}"}}
TEXTS = {"type": "custom", "custom": {"name": "f"}}
WORD = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "regex", "definition": "ab\n"},
}
PATCHED = {
    **{
        "input": HELLO,
        "temperature": 0,
        "max_output_tokens": 120,
        "user": "me",
        "parallel_tool_calls": False,
    },
    "tools": [{"type": "namespace", "name": "mcp__", "tools": [WORD]}, {"type": "web_search"}],
    "tool_choice": {"type": "custom", "name": "patch"},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat("Hello")),
    (CHAT, chat("Hello", stream=True, stream_options={"include_usage": True})),
    (CHAT, chat("Hello", n=2, temperature=1, seed=5, stop="e", logit_bias={"7": 50})),
    (CHAT, chat("Hello", logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)),
    (CHAT, chat("Hello", prompt_logprobs=1, return_token_ids=True, stop_token_ids=[3, 4])),
    (CHAT, chat("Hello", tools=[TOOL], tool_choice=NAMED, max_tokens=120)),
    (CHAT, chat("Hello", tools=[TOOL], tool_choice="required", max_tokens=120)),
    (CHAT, chat("Hello", tools=[HUGE])),
    (CHAT, chat("Hello", **REGEX, request_id="mine")),
    (CHAT, chat("Hello", stream=True, stream_interval=3, add_special_tokens=True, truncate_prompt_tokens=5)),
    (TEXT, {"prompt": "Hello", "temperature": 0}),
    (TEXT, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 2}),
    (TEXT, {"prompt": ["Hello", "you"], "n": 2, "seed": 7, "echo": True}),
    (
        TEXT,
        {"prompt": [[5, 6], [7]], "temperature": 0, "return_token_ids": True, "prompt_logprobs": 0, **REGEX},
    ),
    (TEXT, {"prompt": "Hello", "return_token_ids": True, "stream": True, "seed": 7}),
    (RESPONSES, {"input": "Hello", "instructions": "Be kind.", "temperature": 0, "max_output_tokens": 8}),
    (
        RESPONSES,
        {"input": HELLO, "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 8, "stream": True},
    ),
    *((RESPONSES, {**PATCHED, "stream": stream}) for stream in (False, True)),
    (
        CHAT,
        chat("Hello", tools=[TEXTS], tool_choice={"type": "custom", "custom": {"name": "f"}}, max_tokens=90),
    ),
    (MESSAGES, {"messages": HELLO, "max_tokens": 8, "temperature": 0, "stop_sequences": ["e"]}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 8, "temperature": 0, "stream": True}),
    ("/tokenize", {"messages": HELLO, "return_token_strs": True}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/detokenize", {"tokens": [40, 41, 42]}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
]
REFUSED: list[tuple[str, dict[str, Any] | str]] = [
    (CHAT, "{"),
    (CHAT, {"messages": []}),
    (CHAT, chat("\ud800")),
    (CHAT, chat("Hello", model="\ud800")),
    (CHAT, chat("Hello", modle="tiny")),
    (CHAT, chat("Hello", model="another")),
    (CHAT, chat("Hello", best_of=2)),
    (CHAT, chat("Hello", temperature=-1)),
    (CHAT, chat("a" * 40_000)),
    (CHAT, chat("Hello", tools=[TOOL, TOOL])),
    (CHAT, chat("Hello", chat_template_kwargs={"self": 1})),
    (CHAT, chat("Hello", structured_outputs={"regex": "("})),
    (TEXT, {"prompt": [[10**9]]}),
    (TEXT, {"prompt": ["a"] * 200, "n": 100}),
    (RESPONSES, {"input": "Hello", "top_logprobs": 1}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 8}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [10**9]}),
]
NAMES = [f"{number}{path}" for number, (path, _) in enumerate(CASES)]


def answered(server: LiveServer, path: str, body: bytes) -> tuple[int, str]:
    headers = {**ID, "Content-Type": "application/json"}
    answer = server.http.post(path, content=body, headers=headers)
    # When an answer was made, and ids that are drawn.
    text = re.sub(r'"created(?:_at)?":\d+|(?:call|fc|msg|rs|toolu)[-_]\w+', "", answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        # How many tokens an event holds depends on who is faster.
        text = "".join(NEW.findall(text)) + str(USED.findall(text))
    return answer.status_code, text


@pytest.mark.parametrize(("path", "body"), CASES, ids=NAMES)
def test_a_long_body_is_answered_as_a_short_one(roomy: LiveServer, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    short = answered(roomy, path, data)
    assert short[0] == 200, short
    # What was cached before does not show: the first answer had none of it.
    cached = answered(roomy, path, data)
    assert answered(roomy, path, data + LONG) == cached


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_a_long_body_is_refused_as_a_short_one(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any] | str
) -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    long = answered(live, path, data + LONG)
    assert 400 <= long[0] < 500
    for module in ("chat", "completions"):
        monkeypatch.setattr(f"octavo.server.api.{module}.LONG_BYTES", 1 << 20)
    monkeypatch.setattr("octavo.server.context.LONG_BYTES", 1 << 20)
    assert answered(live, path, data + LONG) == long


@pytest.fixture
def server(serve_tiny: Callable[..., LiveServer]) -> LiveServer:
    return serve_tiny()


def reading(server: LiveServer) -> ReadingProcesses:
    return server.gate.context._reading


def long_chat(server: LiveServer) -> int:
    return answered(server, CHAT, json.dumps(chat("Hello")).encode() + LONG)[0]


def test_short_bodies_start_no_process(server: LiveServer) -> None:
    assert server.post(CHAT, chat("Hello")).status_code == 200
    assert reading(server).pids == []


def test_one_process_reads_one_body_after_the_other(server: LiveServer) -> None:
    assert long_chat(server) == 200
    pids = reading(server).pids
    assert long_chat(server) == 200
    assert len(pids) == 1
    assert reading(server).pids == pids


def test_a_process_that_is_killed_is_replaced(server: LiveServer) -> None:
    assert long_chat(server) == 200
    (pid,) = reading(server).pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert long_chat(server) == 200
    assert len(reading(server).pids) == 1
    assert reading(server).pids != [pid]


def test_a_body_that_takes_too_long_to_read_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CPU_SECONDS", 0.001)
    documents = {"documents": [[]] * 100_000}
    status, text = answered(server, CHAT, json.dumps(chat("Hi", chat_template_kwargs=documents)).encode())
    assert status == 413
    assert "processor time" in text
    assert reading(server).pids == []


def statuses(server: LiveServer, num: int, size: int) -> list[int]:
    """Send so many bodies of a size at once, whose child is stopped until each is refused or waits."""
    (pid,) = reading(server).pids
    assert pid is not None
    body = json.dumps({"prompt": [5, 6], "max_tokens": 1}).encode().ljust(size)

    def send(_: int) -> int:
        headers = {"Content-Type": "application/json"}
        return httpx.post(server.url + TEXT, content=body, headers=headers, timeout=300).status_code

    def have_come() -> bool:
        waiting = sum(map(len, reading(server)._threads._waiting.values()))
        return 1 + waiting + sum(one.done() for one in sent) == num

    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(num) as pool:
        try:
            sent = [pool.submit(send, number) for number in range(num)]
            eventually(have_come)
        finally:
            os.kill(pid, signal.SIGCONT)
    return [one.result() for one in sent]


def test_hundreds_of_long_bodies_of_a_sender_wait(server: LiveServer) -> None:
    assert long_chat(server) == 200
    assert statuses(server, 200, 40_000) == [200] * 200
    server.assert_drained()


def test_a_flood_of_large_bodies_is_refused(serve_tiny: Callable[..., LiveServer]) -> None:
    server = serve_tiny(max_body_bytes=64 << 10)
    assert long_chat(server) == 200
    found = statuses(server, 60, 64 << 10)
    # One is with the child, and 32 of the largest may wait.
    assert set(found) == {200, 429}
    assert found.count(200) <= 33
    server.assert_drained()


def test_processes_end_with_their_server(server: LiveServer) -> None:
    assert long_chat(server) == 200
    (pid,) = reading(server).pids
    server.gate.context.close()
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))


def test_the_process_needs_neither_pytorch_nor_a_server() -> None:
    code = "import sys, octavo.server.reading.child; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "granian", "starlette"} & set(found.stdout.split())
