"""The application: a front that reads requests, and replicas, each a whole server without sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.cli.command_line import app as cli
from octavo.config import EngineConfig
from octavo.errors import EngineDeadError, NotReadyError
from octavo.ray.prefix_router import REPORT, PrefixRouter
from octavo.router import Marks, read_marks
from octavo.router.marks import HEADER
from octavo.server.api_errors import EVENT_END, ApiError, as_api_error, broken_stream_event
from octavo.server.config import ServerConfig
from octavo.server.entry.bodies import BodyReader
from octavo.server.entry.door import Door
from octavo.server.limits import ClientGoneError

# Ray lets requests wait for a replica; /health does not wait longer than this.
_HEALTH_ANSWER_S = 3.0
_HEALTH_PATHS = ("/health", "/ping", "/ready")
# A request under which so many replicas died is not tried again: it may be the cause.
_MAX_DEATHS = 2

Headers = list[tuple[bytes, bytes]]
# The request's scope as far as it can be sent, its body, and the marks of its prompt.
Parts = tuple[dict[str, Any], bytes, Marks]
_REPORT_S = 1.0
_MAX_ONGOING = 4096
# Requests in flight for each replica, at which autoscaling starts another one.
_TARGET_ONGOING = 32
# A replica that is ended loses its cache.
_KEEP_S = 600.0
_HEALTH_S = 5.0
# The front ends after its replicas, whose last parts it passes on.
_FRONT_S = 5.0


class Front:
    """Reads requests, and passes on what the replicas answer."""

    def __init__(self, server: ServerConfig, replicas: DeploymentHandle) -> None:
        self._isolates = server.cache_isolation == "key"
        self._door = Door(server)
        self._bodies = BodyReader(server)
        self._replicas = replicas.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        try:
            parts = await self._read(request)
            if request.url.path in _HEALTH_PATHS:
                return await self._check_health(parts)
            return await self._answer(parts)
        except ClientGoneError:
            return Response(status_code=499)
        except (ApiError, NotReadyError) as error:
            found = as_api_error(error)
            return Response(found.body, found.status, found.headers, media_type="application/json")

    async def _read(self, request: Request) -> Parts:
        scope, path = request.scope, request.url.path
        headers: Headers = [(name, value) for name, value in scope["headers"] if name != HEADER]
        body = b""
        self._door.check(scope, path, dict(scope["headers"]))
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            body = await self._bodies.read(scope, request.receive)
        marks = await read_marks(path, headers, body, isolates=self._isolates)
        kept = {name: scope[name] for name in ("type", "method", "path", "query_string", "http_version")}
        kept["client"] = scope.get("client")
        return {**kept, "headers": headers}, body, marks

    async def _check_health(self, parts: Parts) -> Response:
        """Answer by a replica that takes requests, or say soon that there is none."""
        try:
            async with asyncio.timeout(_HEALTH_ANSWER_S):
                return await self._answer(parts)
        except (TimeoutError, ApiError):
            raise NotReadyError("no replica answers now; try again in a few seconds") from None

    async def _answer(self, parts: Parts) -> Response:
        """Answer by the best replica; if it dies before its first part of the body, by another one.

        Raises:
            ApiError: 500, two replicas died.
        """
        for _ in range(_MAX_DEATHS):
            answer = self._replicas.remote(*parts)
            try:
                status, listed = await anext(answer)
                first = await anext(answer, b"")
            except RayActorError:
                continue
            headers = [(name, value) for name, value in listed if name != b"content-length"]
            response = StreamingResponse(_rest(first, answer, parts[0]["path"], headers), status)
            response.raw_headers = headers
            return response
        raise ApiError(500, "two replicas died of this request", type="server_error", code="replica_died")


async def _rest(first: bytes, answer: Any, path: str, headers: Headers) -> AsyncIterator[bytes]:
    """Yield the body; if the replica of a stream dies, the last event says so.

    Raises:
        RayActorError: the replica died within an answer that is not a stream.
    """
    last = first[-2:]
    try:
        yield first
        async for piece in answer:
            last = (last + piece)[-2:]
            yield piece
    except RayActorError:
        if not dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        # It may have died within an event.
        yield (b"" if last == EVENT_END else EVENT_END) + broken_stream_event(path)


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
        from octavo.server.replicas.reporting import ReportingApp

        self._loop = EngineLoop(
            partial(Engine, engine),
            max_waiting=server.max_num_queued_reqs,
            max_waiting_tokens=server.max_num_queued_tokens,
            step_deadline_s=server.step_deadline_s,
        )
        # Ray starts a dead engine again, so clients are told to come back.
        server = replace(server, restart=True)
        self._app = ReportingApp(make_server(self._loop, server, engine.model), self._loop)
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
        """Report to the routers what is cached here, and how much there is to do."""
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
