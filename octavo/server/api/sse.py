"""Server-sent events: headers at once, events as they come, comments meanwhile, an error as an event."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.outputs import CompletionDelta
from octavo.server.errors import ApiError, as_api_error
from octavo.server.generation import Generation
from octavo.server.limits import unless_gone

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(value: msgspec.Struct) -> bytes:
    """Return one event."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(kind: str, value: object) -> bytes:
    """Return one event that tells its kind beside its data, too."""
    return f"event: {kind}\n".encode() + b"data: " + encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return an error as an event; OpenAI's client raises on it."""
    return b"data: " + error.body + b"\n\n"


class EventStream(Response):
    """Answers with events until they end, fail, or nobody reads them any more."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        generation: Generation,
        *,
        keep_alive_s: float,
        write_timeout_s: float,
        last: bytes = _DONE,
        idle: bytes = _PING,
        write_error: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        """Answer with events.

        Args:
            events: one or more whole events each.
            generation: what makes them; aborted when the client leaves.
            keep_alive_s: idle time after which `idle` is sent; 0: never.
            write_timeout_s: how long the client may leave an event unread.
            last: sent at the end, after an error too.
            idle: a comment or an event that says nothing.
            write_error: makes an event of an error.
        """
        super().__init__()
        self._events = events
        self._generation = generation
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._last = last
        self._idle = idle
        self._write_error = write_error
        self._written_at = 0.0
        self._is_writing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; the generation has ended when this returns or raises."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            # Directly to the server: each layer between costs as much as writing an event.
            send = scope.get("octavo.send", send)
            await unless_gone(receive, self._pump(send), self._guard(send))
        finally:
            self._generation.abort()

    async def _pump(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        try:
            async with aclosing(self._events):
                async for events in self._events:
                    if events:
                        self._written_at, self._is_writing = now(), True
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                        self._is_writing = False
        except Exception as error:
            event = self._write_error(as_api_error(error))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def _guard(self, send: Send) -> None:
        """Send `idle` while nothing else is sent; return when the client does not read any more."""
        loop = asyncio.get_running_loop()
        limits = [limit for limit in (self._keep_alive_s, self._write_timeout_s) if limit]
        self._written_at = loop.time()
        while True:
            await asyncio.sleep(min(limits) / 2)
            idle_s = loop.time() - self._written_at
            if self._is_writing:
                if idle_s > self._write_timeout_s:
                    return
            elif self._keep_alive_s and idle_s >= self._keep_alive_s:
                self._written_at = loop.time()
                await send({"type": "http.response.body", "body": self._idle, "more_body": True})


class Gathered:
    """Merges deltas of the same text until there are enough tokens for one event."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], CompletionDelta] = {}

    def add(self, position: int, deltas: list[CompletionDelta]) -> list[CompletionDelta]:
        """Take the new deltas of a prompt; return those that are due."""
        if self._interval == 1:
            return deltas
        due = []
        for delta in deltas:
            held = self._held.pop((position, delta.index), None)
            merged = delta if held is None else _joined(held, delta)
            if merged.finish_reason is not None or len(merged.token_ids) >= self._interval:
                due.append(merged)
            else:
                self._held[position, delta.index] = merged
        return due


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None
    if second.logprobs is not None:
        logprobs = (first.logprobs or ()) + second.logprobs
    return CompletionDelta(
        request_id=second.request_id,
        index=second.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        message=second.message,
        output=second.output,
    )
