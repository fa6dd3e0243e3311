"""Runs the front from start to drain."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.server.config import ServerConfig
from octavo.server.replicas.front import Front
from octavo.server.run import leave_on_signals, make_server

_POLL_S = 0.05
_STOP_S = 2.0


async def serve_front(config: ServerConfig, sockets: Sequence[Path], tell_ready: Callable[[], None]) -> None:
    """Serve until a signal, then drain.

    Args:
        config: the options.
        sockets: [N] unix sockets of the replicas, which may not exist yet.
        tell_ready: called once, when all replicas accept requests for the first time.
    """
    leave = asyncio.Event()
    leave_on_signals(leave)
    front = Front(config, sockets)
    if config.uds is not None:
        # Only this user may connect.
        os.umask(0o177)
    server = make_server(front, config)
    serving = asyncio.ensure_future(server.serve())
    watching = asyncio.ensure_future(front.watch())
    announcing = asyncio.ensure_future(_announce(front, tell_ready))
    leaving = asyncio.ensure_future(leave.wait())
    try:
        await asyncio.wait((serving, watching, leaving), return_when=asyncio.FIRST_COMPLETED)
        for ended in (serving, watching):
            if ended.done():
                ended.result()
        await _drain(front, config.shutdown_timeout)
    finally:
        for task in (announcing, leaving, watching):
            task.cancel()
        server.stop()
        await asyncio.wait((serving, watching), timeout=_STOP_S)


async def _announce(front: Front, tell_ready: Callable[[], None]) -> None:
    while not all(replica.is_ready for replica in front.fleet.replicas):
        await asyncio.sleep(_POLL_S)
    tell_ready()


async def _drain(front: Front, timeout_s: float) -> None:
    """Wait for requests in flight. Those left at the timeout break off when the links close."""
    front.is_draining = True
    deadline = time.monotonic() + timeout_s
    while front.num_open and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
