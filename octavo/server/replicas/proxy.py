"""Forwards a request to one replica and streams the response back."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from starlette.types import Message, Send
from yarl import URL

from octavo.router import Flight, Marks, Report
from octavo.router.ledger import REPORT_PATH
from octavo.router.marks import CLIENT_HEADER, HEADER
from octavo.server.api.anthropic.messages_structs import OVERLOADED
from octavo.server.api_errors import EVENT_END, broken_stream_event
from octavo.server.limits import Stop, send_body

# Headers that belong to one connection, or that the sender sets itself.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length"}
)
_NOT_SENT_ON = _HOP_BY_HOP | {HEADER, CLIENT_HEADER}
# Streams of these routes begin with events that carry no token.
_ANNOUNCED = ("/v1/responses", "/v1/messages")
_FETCH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_REPORT_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# No total limit: prefill may take long, and reports show whether the replica is alive.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
# Shorter than the keep-alive of a replica, so no request hits a connection that is being closed.
_KEEP_ALIVE_S = 5.0

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request.

    Attributes:
        method: GET, POST, ...
        path: as sent, with the query, without the root path.
        headers: with names in lower case.
        body: the complete body.
        marks: those of its prompt.
        client: its address.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    marks: Marks
    client: str


class ReplicaSilentError(aiohttp.ClientError):
    """The replica does not answer, and has been given up."""


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
        # One for each request that the replica may still be working on.
        self._stops: set[Stop] = set()

    def break_off(self) -> None:
        """Give up all requests in flight: the replica does not answer, and may never do so again."""
        for stop in [*self._stops]:
            stop.set()

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

    async def fetch(self, request: ClientRequest) -> tuple[int, Headers, bytes]:
        """Return the complete response to a request that takes no time.

        Raises:
            aiohttp.ClientError: the replica is down.
            TimeoutError: it is slow.
        """
        async with self._request(request, timeout=_FETCH_TIMEOUT) as answer:
            return answer.status, _kept(answer.raw_headers), await answer.read()

    async def pass_on(
        self, request: ClientRequest, flight: Flight, send: Send, *, more: Headers, final: bool
    ) -> bool:
        """Forward a request, and send the response to the client.

        Args:
            asked: the request.
            flight: its entry in the router's books.
            send: to the client.
            more: headers to add to the response.
            final: forward a 503 as well.

        Returns:
            False for a 503 (or Anthropic's 529), unless `final`: nothing was sent to the client, so another
            replica may answer.

        Raises:
            aiohttp.ClientError: the replica is down or silent, and nothing was sent to the client.
            ClientGoneError: the client left or does not read.
        """
        stop, begun = Stop(), False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._stops.add(stop)
        try:
            work = self._forward(request, flight, note, stop, more=more, final=final)
            return await stop.unless_set(work, ReplicaSilentError)
        except aiohttp.ClientError:
            if not begun:
                raise
            flight.replica.note_report(None)
            # It may have died in the middle of an event.
            await send_body(
                send, EVENT_END + broken_stream_event(request.path), self._write_timeout_s, more=False
            )
            return True
        finally:
            self._stops.discard(stop)

    async def _forward(
        self, request: ClientRequest, flight: Flight, send: Send, stop: Stop, *, more: Headers, final: bool
    ) -> bool:
        answer = await self._request(request)
        try:
            if answer.status in (503, OVERLOADED) and not final:
                return False
            headers = _kept(answer.raw_headers) + more
            begin = {"type": "http.response.start", "status": answer.status, "headers": headers}
            if answer.content_type == "text/event-stream":
                await self._pump(answer, begin, request.path, flight, send)
                return True
            body = await answer.read()
            # A complete answer must not be broken off.
            self._stops.discard(stop)
            length = (b"content-length", str(len(body)).encode())
            await send({**begin, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": body})
            return True
        finally:
            # Closing does not wait for a replica that has stopped reading.
            answer.close()

    def _request(
        self, request: ClientRequest, timeout: aiohttp.ClientTimeout = _TIMEOUT
    ) -> "aiohttp.client._RequestContextManager":
        headers = [(name, value) for name, value in request.headers if name not in _NOT_SENT_ON]
        headers.append((CLIENT_HEADER, request.client.encode()))
        if request.marks.digests:
            headers.append((HEADER, request.marks.to_header().encode()))
        return self._session.request(
            request.method,
            _url(request.path),
            data=request.body or None,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            allow_redirects=False,
            timeout=timeout,
        )

    async def _pump(
        self, answer: aiohttp.ClientResponse, begin: Message, path: str, flight: Flight, send: Send
    ) -> None:
        """Forward events. Until there is one of the first token, another replica may answer instead."""
        piece = await answer.content.readany()
        if path.startswith(_ANNOUNCED):
            piece += await answer.content.readany()
        flight.note_first_byte()
        await send(begin)
        while piece:
            await send_body(send, piece, self._write_timeout_s, more=True)
            piece = await answer.content.readany()
        await send_body(send, b"", self._write_timeout_s, more=False)


def _url(path: str) -> URL:
    return URL(f"http://replica{path}", encoded=True)


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name != b"date"]
