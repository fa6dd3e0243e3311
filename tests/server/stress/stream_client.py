"""A small asyncio HTTP client: many streams for little CPU, each on a connection that can be cut anywhere."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# No read of a sound server takes so long: whoever waits longer counts as hanging.
HANG_S = 60.0


class Answer:
    """One answer under way.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def _read_head(self) -> None:
        head = (await self._in_time(self._reader.readuntil(b"\r\n\r\n"))).decode("latin-1")
        first, *rest = head.strip().split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        self.headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in rest)}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            ConnectionError: it ended in the middle.
        """
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._in_time(self._reader.readexactly(int(self.headers["content-length"])))
            return
        while size := int(await self._in_time(self._reader.readuntil(b"\r\n")), 16):
            yield (await self._in_time(self._reader.readexactly(size + 2)))[:-2]

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of server-sent events, the final [DONE] included."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:]

    async def _in_time(self, work: Any) -> Any:
        try:
            async with asyncio.timeout(HANG_S):
                return await work
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the answer ended in the middle") from error

    def cut(self) -> None:
        """Leave at once, without a word."""
        self._writer.transport.abort()


async def post(port: int, path: str, body: Any) -> Answer:
    """Send a request with a body of JSON; return when the status is there."""
    data = json.dumps(body).encode()
    return await exchange(port, head_of("POST", path, len(data)) + data)


def head_of(method: str, path: str, num_bytes: int, kind: str = "application/json") -> bytes:
    """Return the head of a request whose body has so many bytes."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {num_bytes}\r\n\r\n".encode()


async def exchange(port: int, data: bytes) -> Answer:
    """Send bytes as they are; return when a status is there.

    Raises:
        ConnectionError: the server closed before.
        TimeoutError: it is silent.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer(reader, writer)
    try:
        writer.write(data)
        await answer._read_head()
    except BaseException:
        answer.cut()
        raise
    return answer


async def whole(port: int, path: str, body: Any) -> tuple[int, Any]:
    """Return (status, body) of a request whose answer is JSON."""
    answer = await post(port, path, body)
    try:
        return answer.status, await answer.json()
    finally:
        answer.cut()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **fields}
