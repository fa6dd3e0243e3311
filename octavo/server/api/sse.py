"""Server-sent events: headers at once, events as they come, comments meanwhile, an error as an event."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.outputs import CompletionDelta
from octavo.server.api.structs import SamplingFields, Usage
from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.generation import Generation, UsageCounter
from octavo.server.limits import Deadlines, presence_of

_EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode
_ANY_TEXT = "text"
_NOTHING = object()


def json_response(value: object) -> Response:
    """Return a whole answer of a struct, or of what JSON has."""
    return Response(encode(value), media_type="application/json")


def event(value: msgspec.Struct) -> bytes:
    """Return one event."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(kind: str, value: object) -> bytes:
    """Return one event that has a line with its kind above its data."""
    return f"event: {kind}\n".encode() + b"data: " + encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return an error as an event; OpenAI's client raises on it."""
    return b"data: " + error.body + b"\n\n"


def time_to_look(keep_alive_s: float, write_timeout_s: float) -> float:
    """Return how often, in seconds, a stream checks whether it or its client is idle."""
    return min(limit for limit in (keep_alive_s, write_timeout_s) if limit) / 2


class EventWriter:
    """Makes the events of one streamed answer; each method returns none, one or more whole events."""

    def begin(self) -> bytes:
        """Return what comes before the first delta."""
        return b""

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return what a client gets to see of the deltas of a prompt."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """Return what comes after the last delta of the last prompt."""
        return b""


class AnswerEvents(EventWriter):
    """Writes the events of a chat or of completions: deltas, perhaps several in one, and the usage."""

    def __init__(self, fields: SamplingFields, generation: Generation) -> None:
        options = fields.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._usage = UsageCounter(generation, continuous=bool(options and options.continuous_usage_stats))
        interval = fields.stream_interval or 1
        self._gathered = Gathered(interval) if interval > 1 else None

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return events of new deltas."""
        if self._gathered is not None:
            deltas = self._gathered.add(position, deltas)
        if len(deltas) == 1:
            return self._event(position, deltas[0])
        return b"".join([self._event(position, delta) for delta in deltas])

    def finish(self) -> bytes:
        """Return the usage, if it was asked for."""
        return self._usage_event(self._usage.final) if self._wants_usage else b""

    def _event(self, position: int, delta: CompletionDelta) -> bytes:
        raise NotImplementedError

    def _usage_event(self, usage: Usage) -> bytes:
        raise NotImplementedError


class EventStream(Response):
    """Answers with events until they end, fail, or nobody reads them any more.

    Between the engine's step and the socket there is no task: the streams call `_on_news`, and the server's
    `send` runs in that call. Only when a client has not read what was sent before does a task wait for it.
    """

    def __init__(
        self,
        writer: EventWriter,
        generation: Generation,
        *,
        keep_alive_s: float,
        write_timeout_s: float,
        last: bytes = _DONE,
        idle: bytes = _PING,
        write_error: Callable[[ApiError], bytes] = error_event,
        looks: Deadlines | None = None,
        content_type: bytes = _EVENTS,
    ) -> None:
        """Answer with events.

        Args:
            writer: makes them.
            generation: the prompts to answer; aborted when the client leaves.
            keep_alive_s: idle time after which `idle` is sent; 0: never.
            write_timeout_s: how long the client may leave an event unread.
            last: sent at the end, after an error too.
            idle: a comment or an event that says nothing.
            write_error: makes an event of an error.
            looks: shared by all streams with these times; None: this stream gets its own.
            content_type: of the answer.
        """
        super().__init__()
        self._writer = writer
        self._generation = generation
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._last = last
        self._idle = idle
        self._write_error = write_error
        self._headers = [(b"content-type", content_type), *_HEADERS]
        self._sent_s = 0.0
        self._looks = looks or Deadlines(time_to_look(keep_alive_s, write_timeout_s))
        self._look_number = 0
        # A write that the client has not read yet, and the prompts that have had news since then.
        self._sending: asyncio.Task[None] | None = None
        self._pending: list[int] = []
        self._calls = [partial(self._on_news, position) for position in range(len(generation.streams))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; the generation has ended when this returns or raises."""
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._presence = presence_of(scope, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
            # Events go directly to the server: each layer between costs as much as writing an event.
            self._send = scope.get("octavo.send", send)
            self._sent_s = time.monotonic()
            self._look_number = self._looks.begin(self._look)
            await self._presence.unless_gone(self._send_all())
        finally:
            self._presence.close()
            self._looks.end(self._look_number)
            if self._sending is not None:
                self._sending.cancel()
            self._generation.abort()

    async def _send_all(self) -> None:
        if before := self._writer.begin():
            self._put(before)
        for stream, call in zip(self._generation.streams, self._calls, strict=True):
            stream.when_news(call)
        error = await self._ended
        if self._sending is not None:
            await self._sending
        if error is not None:
            self._put(self._write_error(as_api_error(error)) + self._last, more=False)
            if self._sending is not None:
                await self._sending

    def _on_news(self, position: int) -> bool:
        """Send what is new in a prompt, unless the client must read first; False ends these calls."""
        if self._sending is not None:
            self._pending.append(position)
            return False
        if self._ended.done():
            return False
        generation = self._generation
        try:
            events = self._writer.write(position, generation.take(position))
            if generation.is_done:
                events += self._writer.finish() + self._last
            if events or generation.is_done:
                self._put(events, more=not generation.is_done)
        except Exception as error:
            self._ended.set_result(error)
            return False
        if generation.is_done:
            self._ended.set_result(None)
        return position not in generation.outputs

    def _put(self, events: bytes, *, more: bool = True) -> None:
        self._sent_s = time.monotonic()
        self._sending = begun(self._write(events, more))
        if self._sending is not None:
            self._sending.add_done_callback(self._go_on)

    async def _write(self, events: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
        if not more:
            # A client that has everything may leave.
            self._presence.close()

    def _go_on(self, sent: asyncio.Task[None]) -> None:
        """Send what has come while the client read."""
        self._sending = None
        pending, self._pending = self._pending, []
        if self._ended.done():
            return
        if (error := sent.exception()) is not None:
            self._ended.set_exception(error)
        for position in pending:
            if self._on_news(position):
                self._generation.streams[position].when_news(self._calls[position])

    def _look(self) -> None:
        """Send `idle` while nothing else is sent; give a client up that does not read any more."""
        self._look_number = self._looks.begin(self._look)
        idle_s = time.monotonic() - self._sent_s
        if self._sending is not None:
            if idle_s > self._write_timeout_s:
                self._presence.leave()
        elif self._keep_alive_s and idle_s >= self._keep_alive_s and not self._ended.done():
            try:
                self._put(self._idle)
            except Exception:
                # The connection is gone.
                self._presence.leave()


class Gathered:
    """Merges deltas of the same text until there are enough tokens for one event."""

    def __init__(self, interval: int) -> None:
        """Start empty; an interval of 1 would never keep a delta back."""
        self._interval = interval
        self._pending: dict[tuple[int, int], CompletionDelta] = {}

    def add(self, position: int, deltas: list[CompletionDelta]) -> list[CompletionDelta]:
        """Take the new deltas of a prompt; return those that are due."""
        due = []
        for delta in deltas:
            pending = self._pending.pop((position, delta.index), None)
            merged = delta if pending is None else _joined(pending, delta)
            if merged.finish_reason is not None or len(merged.token_ids) >= self._interval:
                due.append(merged)
            else:
                self._pending[position, delta.index] = merged
        return due


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None if second.logprobs is None else (first.logprobs or ()) + second.logprobs
    text, token_ids = first.text + second.text, first.token_ids + second.token_ids
    return replace(second, text=text, token_ids=token_ids, logprobs=logprobs)


class TextEvents:
    """Writes events of one answer that differ only in their text: all around it is encoded once."""

    def __init__(self, write: Callable[[int, str], bytes]) -> None:
        """Begin with nothing encoded.

        Args:
            write: encodes an event of a choice's index and its new text, the slow way. Nothing that a client
                chose may come after the text.
        """
        self._write = write
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def write(self, index: int, text: str) -> bytes:
        """Return the event of new text, byte for byte as the slow way writes it."""
        around = self._around.get(index)
        if around is None:
            before, _, after = self._write(index, _ANY_TEXT).rpartition(encode(_ANY_TEXT))
            around = self._around[index] = before, after
        return around[0] + encode(text) + around[1]


def is_only_text(delta: CompletionDelta) -> bool:
    """Return whether a client sees nothing of a delta but its text."""
    return delta.finish_reason is None and delta.logprobs is None and delta.text != ""


def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run work up to where it has to wait; return None if it is done, else a task that does the rest.

    This is Python 3.12's eager task, with two differences: the work must not ask for its task before it
    waits, and a task that is cancelled while it first waits closes the work instead of raising in it.
    """
    steps = work.__await__()
    waits_for = next(steps, _NOTHING)
    return None if waits_for is _NOTHING else asyncio.ensure_future(_rest(waits_for, steps))


@coroutine
def _rest(waits_for: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    try:
        # asyncio waits for what a coroutine yields.
        yield waits_for
        yield from steps
    finally:
        steps.close()
