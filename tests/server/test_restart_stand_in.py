"""The parent that answers while a server is started again: whoever has connected gets an answer."""

import asyncio
import socket

from octavo.server.config import ServerConfig
from octavo.server.supervisor import StandIn, listen

HEAD, REST = b"GET /ready HTTP/1.1\r\n", b"Host: a\r\n\r\n"


def connected(listening: socket.socket) -> socket.socket:
    client = socket.create_connection(listening.getsockname(), timeout=10)
    client.sendall(HEAD)
    return client


def answer(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_who_connected_before_the_server_is_back_is_answered() -> None:
    async def run() -> list[socket.socket]:
        listening = listen(config)
        assert listening is not None
        stand_in = StandIn(config)
        stand_in.open(listening)
        clients = [connected(listening)]
        await asyncio.sleep(0.1)  # accepted, its request is not complete
        clients += [connected(listening) for _ in range(5)]  # not accepted yet
        for client in clients:
            client.sendall(REST)
        stand_in.close()
        listening.close()
        await stand_in.finish()
        return clients

    config = ServerConfig(host="127.0.0.1", port=0)
    for client in asyncio.run(run()):
        assert answer(client).startswith(b"HTTP/1.1 503 ")
