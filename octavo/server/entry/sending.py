"""Sends an answer: with the headers that every answer has, whole or in pieces made meanwhile."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.server.api.anthropic.messages_structs import anthropic_status, error_body
from octavo.server.api.left_out import HEADER
from octavo.server.api_errors import ApiError, ollama_error
from octavo.server.limits import presence_of, send_body

_ANTHROPIC = "/v1/messages"
_PIECE_BYTES = 64 << 10
# Placeholder of a part: JSON never contains this byte.
_MARK = b"\0"


class Body:
    """A request's body.

    Attributes:
        is_read: nothing of it is left on the connection, which may carry further requests.
    """

    def __init__(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._receive = receive
        self.is_read = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"

    async def receive(self) -> Message:
        """Return the next message from the client."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.is_read = True
        return message


class Answer:
    """One client's answer.

    Attributes:
        status: once it is sent; 499 if the client left before.
        has_begun: the status was sent.
    """

    def __init__(self, send: Send, scope: Scope, path: str, body: Body) -> None:
        self._send = send
        self._scope = scope
        self._is_ollama = path.startswith("/api/")
        self._is_anthropic = path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")
        self._body = body
        self.status = 0
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a message; complete the first one's headers."""
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                *self._names(),
                (b"x-content-type-options", b"nosniff"),
            ]
        await self.send_as_it_is(message)

    async def send_as_it_is(self, message: Message) -> None:
        """Send a message that another process has written, with its headers."""
        if message["type"] == "http.response.start":
            self.status, self.has_begun = message["status"], True
            if not self._body.is_read:
                # What is left of the body would be taken for the next request.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error."""
        status, body = error.status, error.body
        if self._is_anthropic:
            status, body = anthropic_status(error), error_body(error)
        if self._is_ollama:
            body = ollama_error(error)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        listed = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": listed})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _names(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with the request's id, and with what was left out of it.

        Anthropic's client reads another name of the id.
        """
        request_id = self._scope.get("octavo.request_id", "").encode()
        names = [(b"x-request-id", request_id)] + [(b"request-id", request_id)] * self._is_anthropic
        left_out = self._scope.get("octavo.left_out")
        return names if left_out is None else [*names, (HEADER, left_out.encode())]


class Parts:
    """The long parts of one answer, in order; each is written only while it is sent."""

    def __init__(self) -> None:
        self._parts: list[Iterator[bytes]] = []

    def later(self, values: Iterable[Any]) -> Any:
        """Return a placeholder for a list in a struct; its values are made and encoded when they are sent."""
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
        buffer = bytearray()
        for piece in self._pieces:
            buffer += piece
            if len(buffer) >= _PIECE_BYTES:
                await send_body(send, bytes(buffer), self._write_timeout_s, more=True)
                buffer.clear()
                await asyncio.sleep(0)
        await send_body(send, bytes(buffer), self._write_timeout_s, more=False)
