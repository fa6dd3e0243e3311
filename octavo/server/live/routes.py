"""The page at / and the stream of snapshots that it shows.

Snapshots are made only while there are viewers, one for all of them, at most five a second, and fewer where
that would cost the engine more than a thousandth of its time.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.engine.engine import Engine
from octavo.errors import OctavoError
from octavo.server.api_errors import ApiError
from octavo.server.limits import ClientGoneError, unless_gone
from octavo.server.live.snapshot import Describer, Look, Snapshot, look
from octavo.server.loop.engine_loop import EngineLoop

MIN_INTERVAL_S = 0.2
MAX_WATCHERS = 64
# Shares of time that snapshots may take: of the engine's thread, and of it and the event loop together.
_ENGINE_SHARE, _SHARE = 1e-3, 1e-2
# A cost counts for the next intervals as well, with this factor for each.
_COST_DECAY = 0.9
_WRITE_TIMEOUT_S = 30.0

_ASSETS = (
    "style.css app.js browser.js charts.js chat.js compare.js form.js icon.svg markdown.js pool.js stream.js "
    "tree.js turns.js words.js"
)
PAGE_PATHS = ("/", *(f"/page/{name}" for name in _ASSETS.split()))
"""Paths that are the same for everybody, and need no key."""
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Clients of Ollama's API take this for a server.
_RUNNING = "Ollama is running"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def page_routes(loop: EngineLoop) -> list[Route]:
    """Return the routes of the page, its assets under /page/, and its snapshots at /live.

    The page and its assets are the same for everybody. /live shows what others do: it needs a key where
    the API does, and the page sends the one it was given.
    """
    watch = Watch(loop)

    async def live(request: Request) -> Response:
        return watch.answer()

    routes = [Route(path, _asset(path.removeprefix("/page/")), methods=["GET"]) for path in PAGE_PATHS[1:]]
    return [
        Route("/", _front_page(_asset("index.html")), methods=["GET"]),
        *routes,
        Route("/live", live, methods=["GET"]),
    ]


def _front_page(page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Answer with the page; clients that ask for plain text get the words that they look for."""

    async def answer(request: Request) -> Response:
        accepted = request.headers.get("accept", "")
        if "text/plain" in accepted and "text/html" not in accepted:
            return Response(_RUNNING, media_type="text/plain; charset=utf-8", headers=_HEADERS)
        return await page(request)

    return answer


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("octavo.server.live").joinpath("page", name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)

    return answer


class Watch:
    """Makes snapshots for those who watch. For one event loop.

    Attributes:
        num_made: snapshots so far.
        num_watchers: how many watch.
        engine_s: seconds of the engine's thread that they took.
    """

    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.thread_time) -> None:
        """Begin without watchers.

        Args:
            loop: whose engine is looked at.
            clock: returns the CPU seconds of the calling thread.
        """
        self._loop = loop
        self._clock = clock
        self._describer = Describer()
        self._latest: bytes | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._engine_cost_s = self._cost_s = 0.0
        self.num_made = self.num_watchers = 0
        self.engine_s = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds from one snapshot to the next."""
        return max(MIN_INTERVAL_S, self._engine_cost_s / _ENGINE_SHARE, self._cost_s / _SHARE)

    def answer(self) -> Response:
        """Answer one watcher with an event stream.

        Raises:
            ApiError: 429, too many watch already.
        """
        if self.num_watchers >= MAX_WATCHERS:
            raise ApiError(
                429,
                "too many watch the engine already; try again later",
                type="rate_limit_error",
                code="too_many_watchers",
                headers={"Retry-After": "10"},
            )
        return _EventStream(self.events())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield snapshots as server-sent events. A slow reader misses some; nothing is kept for anybody."""
        with self._watching():
            number = self.num_made - (self._latest is not None)
            while True:
                if number == self.num_made:
                    await self._changed.wait()
                number = self.num_made
                if self._latest is None:
                    return
                yield self._latest

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self.num_watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self.num_watchers -= 1
            if self.num_watchers == 0:
                self._task.cancel()
                self._latest = None
                # A cancelled task does nothing more, and a new one may begin beside it.
                self._task = None

    async def _run(self) -> None:
        """Make snapshots until the server is about to end and has answered all; then all streams end.

        They end as well if a snapshot fails.
        """
        try:
            while True:
                begun = time.monotonic()
                self._publish(self.encode(await self._snapshot()))
                if self._loop.state == "draining" and self._loop.stats().num_live == 0:
                    # Watchers that miss this one get no more: the server waits for them.
                    await asyncio.sleep(0)
                    return self._publish(None)
                await asyncio.sleep(max(0.0, begun + self.interval_s - time.monotonic()))
        except Exception:
            self._publish(None)
            raise

    def _publish(self, event: bytes | None) -> None:
        self._latest = event
        self.num_made += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _snapshot(self) -> Snapshot:
        """Look at the engine between two steps, and describe what was seen."""
        try:
            seen, engine_s = await self._loop.call(self._look)
        except OctavoError:
            # The engine loads, or is dead.
            return Snapshot(self._loop.state, time.monotonic())
        begun = self._clock()
        snapshot = self._describer.describe(self._loop.state, seen, self._loop.stats())
        self.note_cost(engine_s, engine_s + self._clock() - begun)
        return snapshot

    def _look(self, engine: Engine) -> tuple[Look, float]:
        begun = self._clock()
        seen = look(engine)
        return seen, self._clock() - begun

    def note_cost(self, engine_s: float, all_s: float) -> None:
        """Note the seconds that a snapshot took in the engine's thread, and in all."""
        self.engine_s += engine_s
        self._engine_cost_s = max(engine_s, self._engine_cost_s * _COST_DECAY)
        self._cost_s = max(all_s, self._cost_s * _COST_DECAY)

    @staticmethod
    def encode(snapshot: Snapshot) -> bytes:
        """Return a snapshot as an event."""
        return b"data: " + msgspec.json.encode(snapshot) + b"\n\n"


class _EventStream(Response):
    """Stops watching as soon as the client has left, or has left an event unread for too long."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGoneError, TimeoutError):
            # The stream of a watcher has no end of its own.
            return
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async for event in self._events:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
