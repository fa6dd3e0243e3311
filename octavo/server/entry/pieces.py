"""Whole answers of JSON whose long parts are written while they are sent, and never held as a whole."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.limits import presence_of, send_body

_PIECE_BYTES = 64 << 10
# Stands for a part. JSON never holds this byte.
_MARK = b"\0"


class Parts:
    """The long parts of one answer, in the order in which they occur in it."""

    def __init__(self) -> None:
        self._parts: list[Iterator[bytes]] = []

    def later(self, values: Iterable[Any]) -> Any:
        """Return what stands for a list in a struct; its values are made and encoded when they are sent."""
        self._parts.append(_array(values))
        return msgspec.Raw(_MARK)

    def response(self, answer: msgspec.Struct, write_timeout_s: float) -> Response:
        """Answer with a struct that was made with these parts.

        Args:
            answer: the struct.
            write_timeout_s: how long the client may leave a piece unread.
        """
        written = msgspec.json.encode(answer)
        if not self._parts:
            return Response(written, media_type="application/json")
        return _PiecedResponse(self._pieces(written), write_timeout_s)

    def _pieces(self, written: bytes) -> Iterator[bytes]:
        first, *others = written.split(_MARK)
        yield first
        for part, other in zip(self._parts, others, strict=True):
            yield from part
            yield other


def _array(values: Iterable[Any]) -> Iterator[bytes]:
    before = b"["
    for value in values:
        yield before + msgspec.json.encode(value)
        before = b","
    yield b"]" if before == b"," else b"[]"


class _PiecedResponse(Response):
    """Sends pieces as they are made, and gives way to others after each."""

    def __init__(self, pieces: Iterator[bytes], write_timeout_s: float) -> None:
        super().__init__()
        self._pieces = pieces
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await presence_of(scope, receive).unless_gone(self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        held = bytearray()
        for piece in self._pieces:
            held += piece
            if len(held) >= _PIECE_BYTES:
                await send_body(send, bytes(held), self._write_timeout_s, more=True)
                held.clear()
                await asyncio.sleep(0)
        await send_body(send, bytes(held), self._write_timeout_s, more=False)
