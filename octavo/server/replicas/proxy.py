"""Forwards a request to one replica and streams the response back."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from starlette.types import Send
from yarl import URL

from octavo.router import Flight, Marks, Report
from octavo.router.marks import HEADER
from octavo.server.limits import ClientGoneError
from octavo.server.replicas.last_words import EVENT_END, last_words
from octavo.server.replicas.paths import REPORT_PATH

# Headers that belong to one connection, or that the sender sets itself.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length"}
)
_REPORT_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# No total limit: prefill may take long, and reports show whether the replica is alive.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
# Shorter than the keep-alive of a replica, so no request hits a connection that is being closed.
_KEEP_ALIVE_S = 5.0

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request.

    Attributes:
        method: GET, POST, ...
        path: as sent, with the query, without the root path.
        headers: with names in lower case.
        body: the complete body.
        marks: of its prompt.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    marks: Marks


class Link:
    """The connections to one replica. Use it from one event loop."""

    def __init__(self, socket: Path, write_timeout_s: float) -> None:
        """Set up without connecting.

        Args:
            socket: the replica's unix socket.
            write_timeout_s: how long a client may block a streamed response by not reading.
        """
        connector = aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, auto_decompress=False)
        self._write_timeout_s = write_timeout_s

    async def close(self) -> None:
        """Close all connections. Requests in flight break off."""
        await self._session.close()

    async def report(self) -> Report:
        """Fetch the replica's report.

        Raises:
            aiohttp.ClientError: it is down.
            TimeoutError: it is slow.
            msgspec.DecodeError: the response is not a report.
        """
        headers = {HEADER.decode(): ""}
        async with self._session.get(_url(REPORT_PATH), headers=headers, timeout=_REPORT_TIMEOUT) as answer:
            return Report.decode(await answer.read())

    async def fetch(self, asked: Asked) -> tuple[int, Headers, bytes]:
        """Return the complete response to a request.

        Raises:
            aiohttp.ClientError: the replica is down.
        """
        async with self._request(asked) as answer:
            return answer.status, _kept(answer.raw_headers), await answer.read()

    async def pass_on(self, asked: Asked, flight: Flight, send: Send, *, more: Headers, final: bool) -> bool:
        """Forward a request, and send the response to the client.

        Args:
            asked: the request.
            flight: its entry in the router's books.
            send: to the client.
            more: headers to add to the response.
            final: forward a 503 as well.

        Returns:
            False for a 503, unless `final`: nothing was sent to the client, so another replica may answer.

        Raises:
            aiohttp.ClientError: the replica is down, and nothing was sent to the client.
            ClientGoneError: the client left or does not read.
        """
        async with self._request(asked) as answer:
            if answer.status == 503 and not final:
                return False
            headers = _kept(answer.raw_headers) + more
            begin = {"type": "http.response.start", "status": answer.status, "headers": headers}
            if answer.content_type != "text/event-stream":
                body = await answer.read()
                length = (b"content-length", str(len(body)).encode())
                await send({**begin, "headers": [*headers, length]})
                await send({"type": "http.response.body", "body": body})
                return True
            await send(begin)
            await self._pump(answer, asked.path, flight, send)
            return True

    def _request(self, asked: Asked) -> "aiohttp.client._RequestContextManager":
        headers = [(name, value) for name, value in asked.headers if name not in (*_HOP_BY_HOP, HEADER)]
        if asked.marks.digests:
            headers.append((HEADER, asked.marks.to_header().encode()))
        return self._session.request(
            asked.method,
            _url(asked.path),
            data=asked.body or None,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            allow_redirects=False,
        )

    async def _pump(self, answer: aiohttp.ClientResponse, path: str, flight: Flight, send: Send) -> None:
        """Forward events. If the replica dies, end with an error event, and note that it is down."""
        last = EVENT_END
        try:
            async for piece in answer.content.iter_any():
                flight.note_first_byte()
                last = (last + piece)[-2:]
                await self._write(send, piece, more=True)
            piece = b""
        except aiohttp.ClientError:
            flight.replica.hear(None)
            # It may have died in the middle of an event.
            piece = (b"" if last == EVENT_END else EVENT_END) + last_words(path)
        await self._write(send, piece, more=False)

    async def _write(self, send: Send, piece: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None


def _url(path: str) -> URL:
    return URL(f"http://replica{path}", encoded=True)


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name != b"date"]
