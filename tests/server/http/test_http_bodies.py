"""Bodies that do not come: they keep nobody else out, with or without keys, before replicas too."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from held_bodies import MAX_BODY_BYTES, TEXT, Holder, ask, assert_nobody_waits
from http_helpers import LiveServer, eventually, free_port, raw, start_process

KEYS = ("sk-0123456789abcdef", "sk-fedcba9876543210")
Serve = Callable[..., LiveServer]
# Longer than any test: only room and turns end bodies.
PATIENT = {"max_body_bytes": MAX_BODY_BYTES, "body_timeout_s": 600.0, "min_body_bytes_per_s": 0}


@pytest.fixture(scope="module")
def front(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a front of two replicas, with keys."""
    folder, port = tmp_path_factory.mktemp("front"), free_port()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in PATIENT.items()]
    command = ["serve", str(model_folder), "--load-format=dummy", "--replicas=2", f"--port={port}"]
    command += ["--num-blocks=256", "--block-size=4", *options]
    process = start_process(command, folder, OCTAVO_API_KEY=",".join(KEYS))
    try:
        assert process.stdout is not None
        assert "ready after" in process.stdout.readline()
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_unfinished_bodies_keep_nobody_out(serve_tiny: Serve) -> None:
    server = serve_tiny(**PATIENT)
    # More of them than there is room for, and from the address of the honest client.
    statuses = assert_nobody_waits(server.config.port, "", "")
    assert set(statuses) == {429}
    server.assert_drained()


def test_unfinished_bodies_of_one_key_keep_no_other_out(serve_tiny: Serve) -> None:
    server = serve_tiny(api_key=",".join(KEYS), **PATIENT)
    assert set(assert_nobody_waits(server.config.port, *KEYS)) == {429}
    # Without a key no body is read at all.
    assert set(assert_nobody_waits(server.config.port, "", KEYS[0])) <= {401}


def test_unfinished_bodies_keep_nobody_out_of_replicas(front: int) -> None:
    assert set(assert_nobody_waits(front, *KEYS)) == {429}
    assert set(assert_nobody_waits(front, "", KEYS[0])) <= {401}


def test_a_front_asks_for_the_key_before_the_body(front: int) -> None:
    port = front
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 200000\r\n\r\n".encode())
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()
    for path in ("/live", "/metrics", "/v1/models", "/nowhere"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 401
    for path in ("/", "/health", "/ready"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200


def test_a_body_that_comes_is_never_ended_for_those_that_do_not(serve_tiny: Serve) -> None:
    server = serve_tiny(**PATIENT)
    body = json.dumps({"prompt": [5], "max_tokens": 1}).encode().ljust(MAX_BODY_BYTES)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    where = ("127.0.0.1", server.config.port)
    with (
        Holder(server.config.port, address="127.0.0.2") as holder,
        socket.create_connection(where, timeout=60) as connection,
    ):
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        # Slower than those of another sender, which begin anew whenever they are ended for a third one's.
        for begin in range(0, len(body), 16 << 10):
            before = len(holder.statuses)
            connection.sendall(body[begin : begin + (16 << 10)])
            ask(server.url, 100_000, times=1)
            eventually(lambda before=before: len(holder.statuses) > before)  # type: ignore[misc]
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_body_that_trickles_is_ended(serve_tiny: Serve) -> None:
    server = serve_tiny(body_timeout_s=40.0, min_body_bytes_per_s=1000)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.config.port), timeout=0.5) as connection:
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
        begun = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - begun < 35:
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
    # After one window of ten seconds, long before the body's whole time.
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b"at least 10000 bytes" in answer
    assert b"x-should-retry: false" in answer


def test_so_many_unfinished_bodies_as_may_be_leave_connections_for_others(serve_tiny: Serve) -> None:
    server = serve_tiny(body_timeout_s=600.0, min_body_bytes_per_s=0)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: 20000\r\n\r\n ".encode()
    connections = [socket.create_connection(("127.0.0.1", server.config.port)) for _ in range(2100)]
    try:
        for connection in connections:
            connection.sendall(data)
        room = server.gate.context.bodies._budget
        eventually(lambda: len(room._uploads) == 2048)
        # Those that were silent longest gave way.
        first = connections[0]
        first.settimeout(60)
        assert first.recv(100).startswith(b"HTTP/1.1 429")
        assert {status for status, _ in ask(server.url, 100)} == {200}
    finally:
        for connection in connections:
            connection.close()
    eventually(lambda: not room._uploads)
    assert room._num_bytes == 0


def test_a_client_that_leaves_gives_its_room_back(serve_tiny: Serve) -> None:
    server = serve_tiny(**PATIENT)
    with Holder(server.config.port, num_bodies=20):
        eventually(lambda: len(server.gate.context.bodies._budget._uploads) == 20)
    eventually(lambda: server.gate.context.bodies._budget._num_bytes == 0)
    assert raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
