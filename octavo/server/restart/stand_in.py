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
        self._meetings: set[asyncio.Task[None]] = set()

    def open(self, listening: socket.socket) -> None:
        """Begin to answer; the socket stays the caller's."""
        if self._listening is None:
            self._listening = listening
            listening.setblocking(False)
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, self._tls())

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening = None

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        # A task that awaits connections may be cancelled with one in hand, whose client then waits for ever.
        with suppress(BlockingIOError, InterruptedError):
            while True:
                connection, _ = listening.accept()
                meeting = asyncio.ensure_future(_meet(connection, tls))
                self._meetings.add(meeting)
                meeting.add_done_callback(self._meetings.discard)

    def _tls(self) -> ssl.SSLContext | None:
        if self._config.ssl_certfile is None:
            return None
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._config.ssl_certfile, self._config.ssl_keyfile)
        return tls


async def _meet(connection: socket.socket, tls: ssl.SSLContext | None) -> None:
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_MAX_HEAD_BYTES), _answer)
    # A client that breaks off, or speaks no TLS, gets no answer.
    with suppress(OSError):
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=tls and _TIMEOUT_S
        )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_ANSWER)
            await writer.drain()
    writer.close()
