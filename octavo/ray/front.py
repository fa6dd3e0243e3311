"""The deployment that clients reach: it reads requests, and passes on what the replicas answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import NotReadyError
from octavo.router import Marks, read_marks
from octavo.router.marks import HEADER
from octavo.server.config import ServerConfig
from octavo.server.entry.bodies import BodyReader
from octavo.server.entry.door import Door
from octavo.server.errors import ApiError, as_api_error
from octavo.server.limits import ClientGoneError
from octavo.server.replicas.last_words import EVENT_END, last_words

# Ray lets requests wait for a replica; /health does not wait longer than this.
_HEALTH_S = 3.0
_HEALTH_PATHS = ("/health", "/ping", "/ready")
# A request under which so many replicas died is not tried again: it may be the cause.
_MAX_DEATHS = 2

Headers = list[tuple[bytes, bytes]]
# The request's scope as far as it can be sent, its body, and the marks of its prompt.
Parts = tuple[dict[str, Any], bytes, Marks]


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
            async with asyncio.timeout(_HEALTH_S):
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
        yield (b"" if last == EVENT_END else EVENT_END) + last_words(path)
