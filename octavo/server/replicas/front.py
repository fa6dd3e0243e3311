"""The application that clients reach. It routes each request to a replica and answers /health and /metrics.

It checks hosts and keys before it reads a body, as a lone server does; replicas check them again.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
from starlette.types import Receive, Scope, Send

from octavo.errors import NotReadyError
from octavo.router import Fleet, Flight, Marks, Replica, read_marks
from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.config import ServerConfig
from octavo.server.entry.bodies import BodyBudget, BodyReader
from octavo.server.entry.door import Door
from octavo.server.entry.sending import Answer, Body
from octavo.server.limits import ClientGoneError, unless_gone
from octavo.server.replicas.fleet_metrics import CONTENT_TYPE, RouterMetrics, merged
from octavo.server.replicas.proxy import ClientRequest, Headers, Link, ReplicaSilentError
from octavo.server.serving import leave_on_signals, make_server

REFRESH_S = 1.0
# A replica that is down is polled more often, as it may return at any moment.
_RETRY_S = 0.2
# Bodies are kept for another replica; all together may take this many times the largest.
_NUM_LARGE_BODIES = 64
# A replica counts as down after this many missing reports in a row, which takes ten seconds.
_MAX_SILENCES = 4
_JSON = [(b"content-type", b"application/json")]

_POLL_S = 0.05
_STOP_S = 2.0


class ReplicaHealth(msgspec.Struct):
    """One replica in the response of GET /health; see octavo.router.Report."""

    replica: str
    state: str
    open_requests: int
    running: int
    waiting: int
    load_tokens: float
    marks: int


class FleetHealth(msgspec.Struct):
    """Response of GET /health and /ready.

    Attributes:
        status: ready, draining, or loading (no replica accepts requests).
    """

    status: str
    replicas: list[ReplicaHealth]


class Front:
    """The front as an ASGI application. Use it from one event loop.

    Attributes:
        fleet: the replicas.
        num_open: requests in flight, without those of /live.
        is_draining: whether new requests are refused.
    """

    def __init__(self, config: ServerConfig, sockets: Sequence[Path]) -> None:
        """Set up without connecting; `watch` connects.

        Args:
            config: the options.
            sockets: [N] unix sockets of the replicas.
        """
        self.fleet = Fleet([str(index) for index in range(len(sockets))])
        self.num_open = 0
        self.is_draining = False
        self._config = config
        self._door = Door(config)
        self._bodies = BodyReader(config)
        self._budget = BodyBudget(config.max_body_bytes * _NUM_LARGE_BODIES)
        self._links = {
            replica.name: Link(socket, config.write_timeout_s)
            for replica, socket in zip(self.fleet.replicas, sockets, strict=True)
        }
        self._metrics = RouterMetrics(self.fleet)

    async def watch(self) -> None:
        """Poll all replicas for reports until cancelled, then close the links."""
        try:
            await asyncio.gather(*map(self._watch, self.fleet.replicas))
        finally:
            for link in self._links.values():
                await link.close()

    async def _watch(self, replica: Replica) -> None:
        link = self._links[replica.name]
        num_silences = 0
        while True:
            try:
                replica.note_report(await link.report())
                num_silences = 0
            except TimeoutError:
                # A slow replica keeps its last report for a while. A clock would not do: this process may
                # have been stopped itself.
                num_silences += 1
                if num_silences >= _MAX_SILENCES:
                    replica.note_report(None)
                    link.break_off()
            except (aiohttp.ClientError, msgspec.DecodeError):
                replica.note_report(None)
            await asyncio.sleep(REFRESH_S if replica.is_ready else _RETRY_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"expected a request over HTTP, got {scope['type']}")
        path = scope["path"].removeprefix(self._config.root_path)
        headers = dict(scope["headers"])
        body = Body(headers, receive)
        answer = Answer(send, scope, path, body)
        # Viewers stay for as long as they can, so they do not count.
        is_counted = path != "/live"
        self.num_open += is_counted
        try:
            self._door.check(scope, path, headers)
            await self._answer(scope, path, body.receive, answer.send_as_it_is)
        except ClientGoneError:
            if not answer.has_begun:
                # The client may have sent half a body, and still wait for an answer.
                await answer.send_error(ApiError(400, "the body ended early", code="incomplete_body"))
        except (ApiError, NotReadyError) as error:
            if answer.has_begun:
                raise
            await answer.send_error(as_api_error(error))
        finally:
            self.num_open -= is_counted

    async def _answer(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        if path in ("/health", "/ping", "/ready"):
            return await self._say_health(path, send)
        if self.is_draining and path not in ("/metrics", "/live"):
            raise NotReadyError("the server is about to end and takes no new requests")
        request = await self._read(scope, path, receive)
        if path == "/metrics":
            return await self._say_metrics(request, send)
        if path == "/live":
            return await self._show(scope, request, receive, send)
        with self._budget.reserve(scope["octavo.sender"], len(request.body)):
            await unless_gone(receive, self._route(request, send))

    async def _read(self, scope: Scope, path: str, receive: Receive) -> ClientRequest:
        headers: Headers = list(scope["headers"])
        query = scope["query_string"].decode("latin-1")
        raw = scope.get("raw_path") or scope["path"].encode()
        whole = raw.decode("latin-1").removeprefix(self._config.root_path) + ("?" + query if query else "")
        body = b""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            body = await self._bodies.read(scope, receive)
        isolates = self._config.cache_isolation == "key"
        marks = await read_marks(path, headers, body, isolates=isolates)
        client = str((scope.get("client") or ("",))[0])
        return ClientRequest(scope["method"], whole, headers, body, marks, client)

    async def _route(self, request: ClientRequest, send: Send) -> None:
        """Send a request to the best replica, and to another one if that refuses or dies before it answers.

        If a replica dies, the request gets one retry, not more: the request itself may be the cause. A
        replica that falls silent was stopped by somebody else.
        """
        tried: set[str] = set()
        num_deaths = 0
        while (flight := self.fleet.send(request.marks, tried)) is not None:
            tried.add(flight.replica.name)
            self._metrics.note(flight)
            try:
                if await self._try(request, flight, send, final=len(tried) == len(self._links)):
                    return
            except aiohttp.ClientError as error:
                flight.replica.note_report(None)
                num_deaths += not isinstance(error, ReplicaSilentError)
                if num_deaths > 1:
                    raise ApiError(
                        500, "two replicas died of this request", type="server_error", code="replica_died"
                    ) from None
            self._metrics.note_retry()
        raise NotReadyError("no replica takes requests now; try again in a few seconds")

    async def _try(
        self,
        request: ClientRequest,
        flight: Flight,
        send: Send,
        *,
        final: bool,
        more: Sequence[tuple[bytes, bytes]] = (),
    ) -> bool:
        name = flight.replica.name
        added = [*more, (b"x-octavo-replica", name.encode())]
        try:
            return await self._links[name].pass_on(request, flight, send, more=added, final=final)
        finally:
            flight.end()

    async def _show(self, scope: Scope, request: ClientRequest, receive: Receive, send: Send) -> None:
        """Answer /live from the replica that ?replica= names (default 0), and add the number of replicas."""
        query = dict(pair.partition("=")[::2] for pair in scope["query_string"].decode("latin-1").split("&"))
        name = query.get("replica", "0")
        if name not in self._links:
            raise ApiError(404, f"there is no replica {name[:20]!r}", param="replica", code="not_found")
        headers = [(b"x-octavo-replicas", str(len(self._links)).encode())]
        others = set(self._links) - {name}
        flight = self.fleet.send(Marks(), others)
        if flight is None:
            raise NotReadyError(f"replica {name} is not ready; try again in a few seconds")
        # A viewer adds no load.
        flight.end()
        with suppress(aiohttp.ClientError):
            await unless_gone(receive, self._try(request, flight, send, final=True, more=headers))
            return
        raise NotReadyError(f"replica {name} is gone; try again in a few seconds")

    async def _say_metrics(self, request: ClientRequest, send: Send) -> None:
        """Answer with the metrics of all replicas, labelled `replica`, and the router's own."""
        ready = [replica.name for replica in self.fleet.replicas if replica.report is not None]
        fetches = [self._links[name].fetch(request) for name in ready]
        found = await asyncio.gather(*fetches, return_exceptions=True)
        texts: dict[str, bytes] = {}
        for name, answer in zip(ready, found, strict=True):
            if isinstance(answer, aiohttp.ClientError | TimeoutError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            status, headers, body = answer
            if status != 200:
                return await _say(send, status, body, headers)
            texts[name] = body
        if not texts:
            raise NotReadyError("no replica answers now; try again in a few seconds")
        text = await asyncio.to_thread(merged, texts) + self._metrics.text()
        await _say(send, 200, text, [(b"content-type", CONTENT_TYPE.encode())])

    async def _say_health(self, path: str, send: Send) -> None:
        health = self.health()
        alive = health.status == "ready" or (
            path != "/ready"
            and any(replica.state not in ("down", "dead", "stalled") for replica in health.replicas)
        )
        headers = _JSON if alive else [*_JSON, (b"retry-after", b"1")]
        await _say(send, 200 if alive else 503, msgspec.json.encode(health), headers)

    def health(self) -> FleetHealth:
        """Return the state of the fleet."""
        replicas = [_health_of(replica) for replica in self.fleet.replicas]
        is_ready = any(replica.is_ready for replica in self.fleet.replicas)
        status = "draining" if self.is_draining else "ready" if is_ready else "loading"
        return FleetHealth(status, replicas)


def _health_of(replica: Replica) -> ReplicaHealth:
    report = replica.report
    return ReplicaHealth(
        replica=replica.name,
        state="down" if report is None else report.state,
        open_requests=replica.num_open,
        running=0 if report is None else report.num_running,
        waiting=0 if report is None else report.num_waiting,
        load_tokens=replica.load_tokens,
        marks=replica.num_marks,
    )


async def _say(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


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
