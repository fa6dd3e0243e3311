"""A client that begins large bodies and never ends them, and one that only wants its answers."""

import json
import selectors
import socket
import threading
import time
from contextlib import suppress

import httpx

TEXT = "/v1/completions"
MAX_BODY_BYTES = 256 << 10


class Holder:
    """Holds unfinished bodies from a thread of its own, and begins a new one whenever one is ended.

    Attributes:
        statuses: of those that were ended.
    """

    def __init__(self, port: int, key: str = "", *, num_bodies: int = 48, address: str = "127.0.0.1") -> None:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" * bool(key) + f"Content-Length: {MAX_BODY_BYTES}\r\n\r\n"
        self.statuses: list[int] = []
        self._data = head.encode() + b" " * (MAX_BODY_BYTES - 1)
        self._where = (("127.0.0.1", port), (address, 0))
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        self._num_bodies = num_bodies
        self.full = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def __enter__(self) -> "Holder":
        self._thread.start()
        assert self.full.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)

    def _hold(self) -> None:
        for _ in range(self._num_bodies):
            self._begin()
        self.full.set()
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.05):
                self._note_end(key.fileobj)  # type: ignore[arg-type]
                self._begin()
        for key in [*self._selector.get_map().values()]:
            key.fileobj.close()  # type: ignore[union-attr]

    def _begin(self) -> None:
        connection = socket.create_connection(*self._where[:1], timeout=2, source_address=self._where[1])
        # A server that has refused it reads no further.
        with suppress(OSError):
            connection.sendall(self._data)
        self._selector.register(connection, selectors.EVENT_READ)

    def _note_end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with suppress(OSError):
            if answer := connection.recv(100):
                self.statuses.append(int(answer[9:12]))
        connection.close()


def ask(url: str, size: int, key: str = "", *, times: int = 5) -> list[tuple[int, float]]:
    """Ask for completions with bodies of so many bytes; return statuses and seconds."""
    body = json.dumps({"prompt": [5, 6], "max_tokens": 1}).encode().ljust(size)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    found = []
    for _ in range(times):
        begun = time.monotonic()
        answer = httpx.post(url + TEXT, content=body, headers=headers, timeout=60)
        found.append((answer.status_code, time.monotonic() - begun))
    return found


def assert_nobody_waits(port: int, attacker: str, honest: str) -> list[int]:
    """Hold bodies with one key and ask with another; return how the held ones were answered."""
    with Holder(port, attacker) as holder:
        for size in (100, 40_000, 200_000):
            for status, seconds in ask(f"http://127.0.0.1:{port}", size, honest):
                assert status == 200
                assert seconds < 20, "the held bodies are waited for"
    return holder.statuses
