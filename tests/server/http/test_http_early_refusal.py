"""A full queue refuses before it reads: small bodies at once, long ones when their clients have sent them."""

import json
import time
from collections.abc import Callable
from http.client import HTTPConnection

import pytest
from http_helpers import LiveServer, chat, eventually

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def test_a_full_queue_refuses_what_it_has_not_read(serve_tiny: Callable[..., LiveServer]) -> None:
    server = serve_tiny({"max_num_seqs": 1}, max_num_queued_reqs=1)
    engine = server.loop.engine
    step = engine.step

    def slow_step() -> None:
        time.sleep(0.05)
        step()

    engine.step = slow_step  # type: ignore[method-assign]
    busy = []
    for number in (1, 2):
        busy.append(HTTPConnection("127.0.0.1", server.config.port))
        post(busy[-1], TEXT, {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "stream": True})
        eventually(lambda number=number: server.loop.stats().num_live == number)  # type: ignore[misc]
        eventually(lambda number=number: server.loop.stats().num_waiting == number - 1)  # type: ignore[misc]
    connection = HTTPConnection("127.0.0.1", server.config.port, timeout=5)
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        # Nobody finds out that this is no JSON, and the client is told that the connection ends here.
        assert refused(connection, path, b"{{{") == 429
        assert connection.sock is None
    # A long body is read, so that its client sees the answer and keeps its connection.
    assert refused(connection, TEXT, b"{" * 20_000) == 400
    assert refused(connection, CHAT, json.dumps(chat("a" * 900_000)).encode()) == 429
    # What takes no place in the queue is answered as ever.
    post(connection, "/tokenize", {"prompt": "abc"})
    assert json.loads(connection.getresponse().read())["count"] > 0
    for one in busy:
        one.close()
    server.assert_drained()
    connection.close()


def post(connection: HTTPConnection, path: str, body: object) -> None:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})


def refused(connection: HTTPConnection, path: str, body: bytes) -> int:
    """Send a body; return the status of its refusal, which is complete."""
    before = connection.sock
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    assert before is None or connection.sock is before
    answer = connection.getresponse()
    told = json.loads(answer.read())
    assert "error" in told
    if answer.status == 429:
        assert int(answer.headers["Retry-After"]) >= 1
    return answer.status


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_empty_queue_reads_and_refuses_what_is_wrong(live: LiveServer, path: str) -> None:
    connection = HTTPConnection("127.0.0.1", live.config.port, timeout=5)
    assert refused(connection, path, b"{{{") == 400
    connection.close()
