"""The application: a front that reads requests, and replicas, each a whole server without sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from octavo.cli.app import app as cli
from octavo.config import EngineConfig
from octavo.errors import EngineDeadError
from octavo.ray.front import Front
from octavo.ray.router import REPORT, PrefixRouter
from octavo.router import Marks
from octavo.router.marks import HEADER
from octavo.server.config import ServerConfig

_REPORT_S = 1.0
_MAX_ONGOING = 4096
# Requests under way for each replica, at which autoscaling starts another one.
_TARGET_ONGOING = 32
# A replica that is ended loses its cache.
_KEEP_S = 600.0
_HEALTH_S = 5.0
# The front ends after its replicas, whose last parts it passes on.
_FRONT_S = 5.0


def read_options() -> tuple[EngineConfig, ServerConfig]:
    """Return the options of `octavo serve` from OCTAVO_... variables and octavo.toml.

    Raises:
        ConfigError, cyclopts.CycloptsError: one is wrong.
    """
    _, bound, _ = cli.parse_args(["serve"], exit_on_error=False, print_error=False)
    found = bound.arguments
    return found.get("engine", EngineConfig()), found.get("server", ServerConfig())


def make_app(engine: EngineConfig, server: ServerConfig) -> Application:
    """Return the application for `serve run`: a front, and up to `server.replicas` replicas behind it."""
    on_gpu = engine.device.startswith("cuda")
    replicas = serve.deployment(
        Replica,
        name="octavo",
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        health_check_period_s=_HEALTH_S,
        ray_actor_options={"num_cpus": 0 if on_gpu else 1, "num_gpus": 1 if on_gpu else 0},
        autoscaling_config=AutoscalingConfig(
            min_replicas=1,
            initial_replicas=server.replicas,
            max_replicas=server.replicas,
            target_ongoing_requests=_TARGET_ONGOING,
            downscale_delay_s=_KEEP_S,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_REPORT_S
        ),
    )
    front = serve.deployment(
        Front,
        name="front",
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=server.shutdown_timeout + _FRONT_S,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(server, replicas.bind(engine, server))


class Replica:
    """A server without sockets."""

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        from octavo.engine.engine import Engine
        from octavo.server.app import make_app as make_server
        from octavo.server.loop.engine_loop import EngineLoop
        from octavo.server.replicas.told import ToldApp

        self._loop = EngineLoop(
            partial(Engine, engine),
            max_waiting=server.max_num_queued_reqs,
            max_waiting_tokens=server.max_num_queued_tokens,
            step_deadline_s=server.step_deadline_s,
        )
        # Ray starts a dead engine again, so clients are told to come back.
        server = replace(server, restart=True)
        self._app = ToldApp(make_server(self._loop, server, engine.model), self._loop)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._loop.start()
        # Ray counts a replica as ready when this has returned.
        await self._loop.wait_until_ready()

    def check_health(self) -> None:
        """Raise if the engine is dead: Ray then starts another replica.

        Raises:
            EngineDeadError: it is.
        """
        if self._loop.state == "dead":
            raise EngineDeadError(f"the engine is dead: {self._loop.error!r}")

    def record_routing_stats(self) -> dict[str, bytes]:
        """Tell the routers what is cached here, and how much there is to do."""
        return {REPORT: self._app.report().encode()}

    async def answer(self, scope: dict[str, Any], body: bytes, marks: Marks) -> AsyncIterator[Any]:
        """Yield (status, headers), then parts of the body. A caller that stops reading aborts the request."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)
        left = asyncio.Event()
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for part in parts:
                return part
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)  # type: ignore[arg-type]
            finally:
                await messages.put(None)

        scope = {**scope, "headers": [*scope["headers"], (HEADER, marks.to_header().encode())]}
        running = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (b"x-octavo-replica", self._name)]
                elif message.get("body"):
                    yield message["body"]
            await running
        finally:
            left.set()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def __del__(self) -> None:
        self._loop.stop()
