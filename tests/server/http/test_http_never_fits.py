"""What can never be answered is refused at once, with 400 or 413, and never as "come back later"."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from http_helpers import LiveServer, chat

from octavo.server.api import logprobs
from octavo.server.api.prompt_tokens import Prompts

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
Serve = Callable[..., LiveServer]
PADDING = b" " * 40_000


def refused(server: LiveServer, path: str, body: Any, *, long: bool = False) -> tuple[int, str]:
    data = json.dumps(body).encode() + PADDING * long
    answer = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert "retry-after" not in answer.headers
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (TEXT, {"prompt": "a", "n": 5}, "is 5, and the queue never holds more than 4"),
        (TEXT, {"prompt": ["a"] * 5}, "is 5, and the queue"),
        (TEXT, {"prompt": [[5]] * 3, "n": 2}, "is 6, and the queue"),
        (CHAT, chat("a", n=5), "is 5, and the queue"),
        (TEXT, {"prompt": [[5] * 30] * 2}, "have 60 tokens, and the queue never holds more than 50"),
        (TEXT, {"prompt": [5] * 600}, "max_model_len"),
        (CHAT, chat("a " * 600), "max_model_len"),
    ],
)
def test_what_the_queue_never_holds(serve_tiny: Serve, long: bool, path: str, body: dict, said: str) -> None:
    server = serve_tiny({"max_num_seqs": 1}, max_num_queued_reqs=4, max_num_queued_tokens=50)
    status, message = refused(server, path, body, long=long)
    assert status == 400
    assert said in message
    # What fits is answered, also if it is more than runs at a time.
    assert server.post(TEXT, {"prompt": [[5], [6]], "n": 2, "max_tokens": 2}).status_code == 200
    server.assert_drained()


@pytest.mark.parametrize("long", [False, True])
def test_too_many_completions_are_refused_before_a_prompt_is_read(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a prompt was read")

    monkeypatch.setattr(Prompts, "read_all", never)
    text = "word " * 150
    for body in (
        {"prompt": [text] * 200, "n": 6},
        {"prompt": [text] * 257},
        {"prompt": ["a"] * 100_000},
        {"prompt": [[5, 6]] * 60_000},
        {"prompt": text, "n": 10**6},
        {"prompt": text, "n": 129},
    ):
        begun = time.monotonic()
        assert refused(live, TEXT, body, long=long)[0] == 400
        assert time.monotonic() - begun < 20
    assert refused(live, TEXT, {"prompt": ["a"] * 1_000_000})[0] == 413
    assert refused(live, CHAT, chat("a", n=10**6))[0] == 400


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (TEXT, {"prompt": [5] * 100, "prompt_logprobs": 20}, "100 tokens x (20 + 1) x 1 = 2100"),
        (TEXT, {"prompt": [[5] * 50] * 3, "prompt_logprobs": 6, "n": 2}, "150 tokens x (6 + 1) x 2 = 2100"),
        (TEXT, {"prompt": [5] * 101, "echo": True, "logprobs": 19}, "101 tokens x (19 + 1) x 1 = 2020"),
        (CHAT, chat("a " * 110, prompt_logprobs=20), "x (20 + 1) x 1"),
        (
            TEXT,
            {"prompt": [5, 6], "logprobs": 5, "n": 4, "max_tokens": 200},
            "200 tokens x (5 + 1) x 4 = 4800",
        ),
        (CHAT, chat("a", logprobs=True, top_logprobs=20, n=2, max_tokens=150), "150 tokens x (20 + 1) x 2"),
    ],
)
def test_log_probabilities_are_bounded(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, long: bool, path: str, body: dict, said: str
) -> None:
    monkeypatch.setattr(logprobs, "MAX_PROMPT_LOGPROBS", 2000)
    monkeypatch.setattr(logprobs, "MAX_LOGPROBS", 4000)
    status, message = refused(live, path, body, long=long)
    assert status == 400
    assert said in message
    fewer = {**body, "n": 1, "max_tokens": 2, **({"prompt_logprobs": 0} if "prompt_logprobs" in body else {})}
    if "echo" in fewer:
        fewer["logprobs"] = 0
    assert live.post(path, fewer).status_code == 200
