"""Runs a server from the first byte to the last: bind, load, serve, drain."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.types import ASGIApp

from octavo.server.config import ServerConfig
from octavo.server.supervisor import DYING, LISTENING, READY, leaving_signals

if TYPE_CHECKING:
    from octavo.server.app import Gate
    from octavo.server.loop.engine_loop import EngineLoop

logger = logging.getLogger("octavo.server")

# Most requests at a time; further ones wait in the kernel's queue.
_MAX_CONNECTIONS = 4096
_MAX_HEADER_BYTES = 64 << 10
_HEADER_TIMEOUT_MS = 10_000
_POLL_S = 0.1
# granian does not say when it listens, which takes it a few milliseconds.
_BIND_S = 0.1
# Time that streams get to end with an error after the engine's death, in seconds.
_ENDING_S = 2.0


async def serve(
    gate: "Gate",
    loop: "EngineLoop",
    config: ServerConfig,
    tell: Callable[[bytes], None],
    app: ASGIApp,
) -> BaseException | None:
    """Serve until a signal or the engine's death; return why the engine died, or None.

    Args:
        gate: the application.
        loop: not started yet.
        config: the options.
        tell: called with LISTENING when clients can connect, with READY when requests are taken, and with
            DYING when the engine is dead, before the process ends.
        app: what is served: the gate, or an application around it.
    """
    leave = asyncio.Event()
    leave_on_signals(leave)
    server = make_server(app, config)
    if config.uds is not None:
        # Only this user may connect.
        os.umask(0o177)
    serving = asyncio.ensure_future(server.serve())
    asyncio.get_running_loop().call_later(_BIND_S, tell, LISTENING)
    loop.start()
    watching = asyncio.ensure_future(_watch(gate, loop, tell))
    leaving = asyncio.ensure_future(leave.wait())
    try:
        await asyncio.wait((serving, watching, leaving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        gate.context.stop_batches()
        if leaving.done() and loop.state == "ready":
            await _drain(gate, loop, config.shutdown_timeout)
        elif watching.done():
            tell(DYING)
            if watching.result():
                await _let_streams_end(gate)
    finally:
        watching.cancel()
        leaving.cancel()
        server.stop()
        await asyncio.wait((serving,), timeout=_ENDING_S)
        gate.context.close()
    return loop.error


def make_server(app: ASGIApp, config: ServerConfig) -> Server:
    """Return the HTTP server, with limits on headers and on the time they take."""
    return Server(
        app,
        address=config.host,
        port=config.port,
        uds=Path(config.uds) if config.uds is not None else None,
        interface=Interfaces.ASGINL,
        # HTTP/2 would allow 16 MiB of headers.
        http=HTTPModes.http1,
        websockets=False,
        backlog=1024,
        backpressure=_MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(
            header_read_timeout=_HEADER_TIMEOUT_MS, max_buffer_size=_MAX_HEADER_BYTES
        ),
        log_level=LogLevels.error,
        ssl_cert=Path(config.ssl_certfile) if config.ssl_certfile else None,
        ssl_key=Path(config.ssl_keyfile) if config.ssl_keyfile else None,
        url_path_prefix=config.root_path or None,
    )


def leave_on_signals(leave: asyncio.Event) -> None:
    """Leave on SIGTERM, Ctrl-C and SIGHUP; at once on the second, but a terminal may send SIGHUP twice."""
    events = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if leave.is_set() and number != signal.SIGHUP:
            os._exit(128 + number)
        leave.set()

    for number in leaving_signals():
        events.add_signal_handler(number, on_signal, number)


async def _drain(gate: "Gate", loop: "EngineLoop", timeout_s: float) -> None:
    """Let requests finish, and their clients read the rest."""
    deadline = time.monotonic() + max(timeout_s, _ENDING_S)
    await loop.drain(timeout_s)
    while gate.num_open and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


async def _let_streams_end(gate: "Gate") -> None:
    """Give streams time to end with an error, and answer others that the engine is dead."""
    deadline = time.monotonic() + _ENDING_S
    await asyncio.sleep(_ENDING_S / 2)
    while gate.num_open and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


async def _watch(gate: "Gate", loop: "EngineLoop", tell: Callable[[bytes], None]) -> bool:
    """Tell when the engine is ready; when it is dead, return whether it ever was ready."""
    while loop.state == "loading":
        await asyncio.sleep(_POLL_S)
    was_ready = loop.state == "ready"
    if was_ready:
        gate.context.get_ready()
        tell(READY)
    while loop.state != "dead":
        await asyncio.sleep(_POLL_S)
    return was_ready
