"""Answers 503 while the process that serves is started again. It imports neither PyTorch nor granian."""

import asyncio
import socket
import ssl
from contextlib import suppress

from octavo.server.config import ServerConfig

_BODY = (
    b'{"error":{"message":"the engine died and is being started again; try again in a few seconds",'
    b'"type":"unavailable_error","param":null,"code":"restarting"}}'
)
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_BACKLOG = 1024
_MAX_HEAD_BYTES, _TIMEOUT_S = 64 << 10, 5.0
# How long the last clients are waited for.
_LAST_S = 1.0


def listen(config: ServerConfig) -> socket.socket | None:
    """Listen beside a process that serves, or will: the kernel lets processes of one user share a port.

    Returns None for a unix socket, whose path only one process can bind.
    """
    if config.uds is not None:
        return None
    family, kind, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found


class StandIn:
    """Answers every client that connects. For one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._listening: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._meetings: set[asyncio.Task[None]] = set()

    def open(self, listening: socket.socket) -> None:
        """Begin to answer; the socket stays the caller's."""
        if self._listening is None:
            self._listening, self._tls = listening, self._make_tls()
            listening.setblocking(False)
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Accept whoever has connected, and no more: closing the socket would reset them. Idempotent."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._accept(self._listening)
            self._listening = None

    async def finish(self) -> None:
        """Close, and wait a moment for the answers: the event loop's end would drop them."""
        self.close()
        if self._meetings:
            await asyncio.wait(self._meetings, timeout=_LAST_S)

    def _accept(self, listening: socket.socket) -> None:
        # A task that awaits connections may be cancelled with one in hand, whose client then waits for ever.
        with suppress(BlockingIOError, InterruptedError):
            while True:
                connection, _ = listening.accept()
                meeting = asyncio.ensure_future(_meet(connection, self._tls))
                self._meetings.add(meeting)
                meeting.add_done_callback(self._meetings.discard)

    def _make_tls(self) -> ssl.SSLContext | None:
        if self._config.ssl_certfile is None:
            return None
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._config.ssl_certfile, self._config.ssl_keyfile)
        return tls


async def _meet(connection: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Answer one client. One that breaks off, speaks no TLS or takes too long gets no answer."""
    events = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        transport, _ = await events.connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=tls and _TIMEOUT_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, events)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_ANSWER)
                writer.close()
                await writer.wait_closed()
        finally:
            writer.close()
