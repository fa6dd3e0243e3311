"""Limits on bodies, time and the queue; what a client that leaves takes along; states of the server."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from http_helpers import LiveServer, chat, eventually, raw, slow

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
Serve = Callable[..., LiveServer]
# Longer than any test: whoever stays, holds its blocks.
LONG = {"max_tokens": 480, "ignore_eos": True}


def request(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@contextmanager
def connected(server: LiveServer, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.config.port), timeout=5) as connection:
        connection.sendall(data)
        yield connection


def num_live(server: LiveServer) -> int:
    return server.loop.stats().num_live


def test_a_body_that_is_too_large(serve_tiny: Serve) -> None:
    server = serve_tiny(max_body_bytes=1000)
    response = server.post(TEXT, {"prompt": "a" * 1000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    # Without a length it is refused while it comes.
    chunks = HEAD_CHUNKED + b"".join(b"100\r\n" + b"a" * 256 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
    assert raw(server, chunks).startswith(b"HTTP/1.1 413")
    assert server.post(TEXT, {"prompt": "a" * 100}).status_code == 200
    server.assert_drained()


def test_a_body_of_too_many_values(serve_tiny: Serve) -> None:
    server = serve_tiny(max_body_values=50)
    for path, body in (
        (TEXT, {"prompt": ["a"] * 60}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"documents": [[]] * 60},
            },
        ),
        ("/v1/responses", {"input": "a", "unknown": [1] * 60}),
        ("/tokenize", {"prompt": "," * 60}),
    ):
        response = server.post(path, body)
        assert response.status_code == 413, path
        error = response.json()["error"]
        assert (error["code"], "50 values" in error["message"]) == ("body_too_large", True)
    assert server.post("/tokenize", {"prompt": "," * 40}).status_code == 200
    server.assert_drained()


HEAD_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def test_a_body_that_does_not_come(serve_tiny: Serve) -> None:
    server = serve_tiny(body_timeout_s=0.2)
    data = request(TEXT, {"prompt": "a"})
    begun = time.monotonic()
    assert raw(server, data[:-3]).startswith(b"HTTP/1.1 408")
    assert 0.2 <= time.monotonic() - begun < 3


def test_slow_headers_do_not_keep_others_away(live: LiveServer) -> None:
    lines = b"GET /health HTTP/1.1\r\nHost: local"
    connections = [socket.create_connection(("127.0.0.1", live.config.port)) for _ in range(200)]
    try:
        for connection in connections:
            connection.sendall(lines)
        begun = time.monotonic()
        assert live.http.get("/health").status_code == 200
        assert time.monotonic() - begun < 5
    finally:
        for connection in connections:
            connection.close()


def test_a_full_queue_sends_away_quickly(serve_tiny: Serve) -> None:
    server = serve_tiny({"max_num_seqs": 1}, max_num_queued_reqs=2)
    slow(server)
    streams = [connected(server, request(TEXT, {"prompt": "a", **LONG})) for _ in range(3)]
    for number, stream in enumerate(streams, start=1):
        stream.__enter__()
        eventually(lambda number=number: num_live(server) == number)
        if number == 1:
            eventually(lambda: server.loop.stats().num_waiting == 0)
    begun = time.monotonic()
    response = server.post(TEXT, {"prompt": "a"})
    assert time.monotonic() - begun < 5, "the queue takes more than 20 s"
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    # The prompt of who is sent away is not read: nobody finds out that these are wrong.
    wrong = (
        (TEXT, {"prompt": [10**6]}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (RESPONSES, {"input": [{}]}),
    )
    for path, body in wrong:
        assert server.post(path, body).status_code == 429, path
    # All of several prompts are let in, or none.
    assert server.post(TEXT, {"prompt": ["a", "b", "c"]}).status_code == 429
    assert num_live(server) == 3
    for stream in streams:
        stream.__exit__(None, None, None)
    server.assert_drained()
    assert server.post(TEXT, {"prompt": "a"}).status_code == 200


def test_nobody_waits_for_ever(serve_tiny: Serve) -> None:
    server = serve_tiny({"max_num_seqs": 1}, queue_timeout_s=0.3)
    slow(server)
    with connected(server, request(TEXT, {"prompt": "a", **LONG})):
        eventually(lambda: num_live(server) == 1 and server.loop.stats().num_waiting == 0)
        for body in ({"prompt": "b"}, {"prompt": ["b", "c"]}):
            response = server.post(TEXT, body)
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "queue_timeout"
        with server.http.stream("POST", TEXT, json={"prompt": "b", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[0][6:])["error"]["code"] == "queue_timeout"
        assert lines[-1] == "data: [DONE]"
    server.assert_drained()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one", "three"])
def test_a_client_that_leaves_takes_its_requests_along(
    slow_live: LiveServer, stream: bool, prompt: str | list[str]
) -> None:
    body = {"prompt": prompt, "stream": stream, "n": 2, **LONG}
    with connected(slow_live, request(TEXT, body)) as connection:
        eventually(lambda: num_live(slow_live) == (1 if prompt == "a" else 3))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    eventually(lambda: num_live(slow_live) == 0)


def test_leaving_in_every_state(serve_tiny: Serve) -> None:
    server = serve_tiny({"max_num_seqs": 2, "max_num_batched_tokens": 16})
    slow(server, 0.005)
    bodies = [
        {"prompt": "a", **LONG},
        {"prompt": "a" * 400},  # leaves in the middle of its prompt
        {"prompt": ["a", "b"], "stream": True, "n": 2, **LONG},
        {"prompt": "queued", **LONG},
    ]
    for round_ in range(5):
        for number, body in enumerate(bodies):
            data = request(TEXT, body)
            whole = (round_ + number) % 3
            # In the middle of the body, at once, or a little later.
            with connected(server, data if whole else data[:-5]):
                time.sleep(0.01 * whole)
    server.assert_drained()
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_comments_while_nothing_comes(serve_tiny: Serve) -> None:
    server = serve_tiny(sse_keep_alive_s=0.05)
    slow(server, 0.3)
    body = chat("Hi", max_tokens=2, stream=True, ignore_eos=True)
    with server.http.stream("POST", CHAT, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.count(": ping") >= 2
    assert lines[0] == ": ping"
    assert lines[-1] == "data: [DONE]"


def test_a_client_that_reads_nothing_loses_its_stream(serve_tiny: Serve) -> None:
    server = serve_tiny({"max_num_seqs": 64, "num_blocks": 8192}, write_timeout_s=0.3)
    # Some megabytes fit the buffers of the kernel and of the HTTP server; these are hundreds.
    body = {"prompt": ["a"] * 32, "n": 16, "stream": True, "logprobs": 20, **LONG}
    with connected(server, request(TEXT, body)):
        eventually(lambda: server.loop.stats().num_finished == {"abort": 32}, 60)
    server.assert_drained()


def test_an_engine_error_ends_one_stream_with_an_error(serve_tiny: Serve) -> None:
    server = serve_tiny()
    slow(server)
    engine = server.loop.engine
    launch = engine.runner.launch

    def broken(step: object) -> object:
        raise RuntimeError("a secret prompt")

    with server.http.stream("POST", CHAT, json=chat("Hi", stream=True, **LONG)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        engine.runner.launch = broken  # type: ignore[method-assign]
        rest = [line for line in lines if line]
    engine.runner.launch = launch  # type: ignore[method-assign]
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert rest[-1] == "data: [DONE]"
    eventually(lambda: server.post(CHAT, chat("Hi")).status_code == 200)
    server.assert_drained()


def test_503_while_draining(serve_tiny: Serve) -> None:
    server = serve_tiny()
    server.on_events(lambda: server.loop.drain(0.1))
    response = server.post(CHAT, chat("Hi"))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "draining" in response.json()["error"]["message"]
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200


def test_loading_is_alive_but_not_ready(serve_tiny: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine.engine import Engine

    may_load = threading.Event()
    make = Engine.__init__

    def late(self: Engine, *arguments: object, **keywords: object) -> None:
        may_load.wait(60)
        make(self, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "__init__", late)
    server = serve_tiny(ready=False)
    try:
        assert server.http.get("/health").json()["status"] == "loading"
        assert server.http.get("/ready").status_code == 503
        response = server.post(CHAT, chat("Hi"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert server.http.get("/metrics").status_code == 200
    finally:
        may_load.set()
    server.wait_until_ready()
    assert server.http.get("/ready").status_code == 200


def test_routes_may_have_a_prefix(serve_tiny: Serve) -> None:
    server = serve_tiny(root_path="/llm", api_key="sk-0123456789")
    key = {"Authorization": "Bearer sk-0123456789"}
    assert server.post("/llm" + CHAT, chat("Hi"), headers=key).status_code == 200
    assert server.http.get("/llm/v1/models").status_code == 401
    assert server.http.get("/llm/health").status_code == 200


def test_lower_priorities_go_first(serve_tiny: Serve) -> None:
    server = serve_tiny({"max_num_seqs": 1})
    slow(server)
    done: list[int] = []

    def ask(priority: int) -> None:
        server.post(TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "priority": priority})
        done.append(priority)

    with connected(server, request(TEXT, {"prompt": "a", **LONG})):
        eventually(lambda: num_live(server) == 1 and server.loop.stats().num_waiting == 0)
        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (5, 1, 9, 3)]
        for number, thread in enumerate(threads, start=2):
            thread.start()
            eventually(lambda number=number: num_live(server) == number)
    for thread in threads:
        thread.join()
    assert done == [1, 3, 5, 9]


def test_a_dead_engine_is_not_healthy(serve_tiny: Serve) -> None:
    server = serve_tiny()
    slow(server)
    with server.http.stream("POST", CHAT, json=chat("Hi", stream=True, **LONG)) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.loop.stop()
        begun = time.monotonic()
        rest = [line for line in lines if line]
    assert time.monotonic() - begun < 5
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert server.http.get("/ready").status_code == 503
    with httpx.Client(base_url=server.url) as client:
        assert client.post(CHAT, json=chat("Hi")).status_code in (500, 503)
