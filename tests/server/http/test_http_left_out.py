"""What was left out of a body is named in its answer's headers: whole, streamed, long, counted, refused."""

import json
from typing import Any

import pytest
from http_helpers import LiveServer

from octavo.server.reading.processes import LONG_BYTES

TURN = {"role": "user", "content": "Hi"}
CACHED = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [TURN], "user": "me", "verbosity": "low"}, "user, verbosity"),
    ("/v1/chat/completions", {"messages": [CACHED]}, "messages[].content[].cache_control"),
    ("/v1/chat/completions", {"messages": [TURN], "reasoning_effort": "high"}, "reasoning effort"),
    ("/v1/chat/completions", {"messages": [TURN], "thinking": {"type": "disabled"}}, "thinking"),
    ("/v1/completions", {"prompt": "Hi", "keep_alive": -1}, "keep_alive"),
    (
        "/v1/responses",
        {"input": "Hi", "client_metadata": {"a": "b"}, "tools": [{"type": "web_search"}]},
        "client_metadata, tools[] web_search",
    ),
    (
        "/v1/responses",
        {"input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}},
        "reasoning.summary, reasoning effort",
    ),
    ("/v1/messages", {"messages": [TURN], "service_tier": "auto"}, "service_tier"),
    (
        "/v1/messages/count_tokens",
        {"messages": [TURN], "cache_control": {"type": "ephemeral"}},
        "cache_control",
    ),
]


@pytest.mark.parametrize(("path", "fields", "named"), CASES)
@pytest.mark.parametrize("form", ["whole", "stream", "long"])
def test_what_was_left_out_is_named(
    live: LiveServer, form: str, path: str, fields: dict[str, Any], named: str
) -> None:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = fields if path.endswith("count_tokens") else {most: 1, **fields}
    if form == "stream" and not path.endswith("count_tokens"):
        body = {**body, "stream": True}
    padding = b" " * LONG_BYTES if form == "long" else b""
    content = padding + json.dumps(body).encode()
    answer = live.http.post(path, content=content, headers={"content-type": "application/json"})
    assert named in answer.headers["x-octavo-left-out"]


def test_nothing_left_out_is_no_header(live: LiveServer) -> None:
    answer = live.http.post("/v1/chat/completions", json={"messages": [TURN], "max_tokens": 1, "store": None})
    assert answer.status_code == 200
    assert "x-octavo-left-out" not in answer.headers
