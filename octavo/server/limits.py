"""Limits on what a client sends and on its time, and the end of its work when it leaves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, too_many_bodies

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Found = TypeVar("Found")

# All bodies together may take this many times the largest.
_NUM_LARGE_BODIES = 32
# Such a body comes along with its headers.
_SMALL_BYTES = 8 << 10


class ClientGoneError(Exception):
    """The client left or stopped reading, so there is nobody to answer."""


class Deadlines:
    """Calls what has not ended after a time that is the same for all.

    asyncio's own timers are Python objects in a sorted heap: with hundreds of requests they are a tenth of
    what a request takes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # In the order in which they are due.
        self._calls: dict[int, tuple[float, Callable[[], None]]] = {}
        # Those that the event loop is about to call.
        self._due: dict[int, Callable[[], None]] = {}
        self._num_begun = 0
        # Which event loop has a timer of ours.
        self._looks_in: asyncio.AbstractEventLoop | None = None

    def begin(self, call: Callable[[], None]) -> int:
        """Call a function when the time is over; return the number by which `end` prevents it."""
        self._num_begun += 1
        self._calls[self._num_begun] = time.monotonic() + self._timeout_s, call
        if self._looks_in is not asyncio.get_running_loop():
            self._look_after(self._timeout_s)
        return self._num_begun

    def end(self, number: int) -> None:
        """Do not call any more. Idempotent."""
        self._calls.pop(number, None)
        self._due.pop(number, None)

    def _look_after(self, seconds: float) -> None:
        self._looks_in = asyncio.get_running_loop()
        self._looks_in.call_later(seconds, self._look)

    def _look(self) -> None:
        self._looks_in = None
        while self._calls:
            number, (due_s, call) = next(iter(self._calls.items()))
            if (seconds := due_s - time.monotonic()) > 0:
                self._look_after(seconds)
                return
            del self._calls[number]
            self._due[number] = call
            # An error in it is not ours.
            asyncio.get_running_loop().call_soon(self._call, number)

    def _call(self, number: int) -> None:
        call = self._due.pop(number, None)
        if call is not None:
            call()


class BodyReader:
    """Reads the bodies of requests, with limits on one of them, on all together and on time."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_bytes = config.max_body_bytes
        self._max_values = config.max_body_values
        self._timeout_s = config.body_timeout_s
        self._deadlines = Deadlines(config.body_timeout_s)
        self._num_bytes = 0

    async def read(
        self,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        before_small: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Return a body of JSON.

        Args:
            headers: of the request, names in lower case.
            receive: gives the body's pieces.
            before_small: may refuse a request before a small body is read, which takes two changes of thread:
                they are slow while the engine works. The client of a longer one may still be sending it, and
                would not see an answer.

        Raises:
            ApiError: 415 no JSON, or compressed; 413 too large, or too many values; 408 too slow; 429 too
                many large bodies at a time.
            ClientGoneError: the client left while it sent the body.
        """
        found = dict(headers)
        kind = found.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(
                415, "expected the header Content-Type: application/json", code="unsupported_media_type"
            )
        if found.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(
                415,
                "expected a body without Content-Encoding: send it uncompressed",
                code="unsupported_media_type",
            )
        length = found.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._max_bytes:
            raise self._too_large()
        if 0 < int(length) <= _SMALL_BYTES:
            before_small()
        late = Stop()
        number = self._deadlines.begin(late.set)
        try:
            body = await late.unless_set(self._read(receive), TimeoutError)
        except TimeoutError:
            message = f"the body was not there after {self._timeout_s:g} s"
            raise ApiError(
                408, message, code="request_timeout", headers={"x-should-retry": "false"}
            ) from None
        finally:
            self._deadlines.end(number)
        # A value takes as much time and memory to read as 100 characters of a text.
        if len(body) > self._max_values and body.count(b",") >= self._max_values:
            message = f"a body may have at most {self._max_values} values, that is as many commas"
            raise ApiError(413, message, code="body_too_large")
        return body

    async def _read(self, receive: Receive) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                piece = message.get("body", b"")
                size += len(piece)
                self._num_bytes += len(piece)
                if size > self._max_bytes:
                    raise self._too_large()
                if self._num_bytes > self._max_bytes * _NUM_LARGE_BODIES:
                    raise too_many_bodies()
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
        finally:
            self._num_bytes -= size

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body may have at most {self._max_bytes} bytes", code="body_too_large")


class Stop:
    """Cancels work in the task that waits for it, without a task of its own."""

    def __init__(self) -> None:
        self._working: asyncio.Task[Any] | None = None
        self._is_set = False

    async def unless_set(self, work: Coroutine[Any, Any, Found], error: type[Exception]) -> Found:
        """Return what `work` returns; cancel it when this is set, and raise the error."""
        if self._is_set:
            work.close()
            raise error
        task = asyncio.current_task()
        assert task is not None
        self._working, num_before = task, task.cancelling()
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_set and task.cancelling() == num_before + 1:
                raise error from None
            raise
        finally:
            self._working = None
            if self._is_set:
                task.uncancel()

    def set(self) -> None:
        """Cancel the work, now and later. Idempotent."""
        if not self._is_set:
            self._is_set = True
            if self._working is not None:
                self._working.cancel()


class Presence:
    """Whether a request's client is still there. Once its body was read, all that it can do is leave.

    For the task that answers the request.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = Stop()
        self._watching: asyncio.Task[None] | None = None

    async def unless_gone(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Return what `work` returns; cancel it when the client leaves.

        Raises:
            ClientGoneError: the client has left.
        """
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        return await self._gone.unless_set(work, ClientGoneError)

    def leave(self) -> None:
        """Take the client for gone."""
        self._gone.set()

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        # A connection that cannot be received from has no client either.
        with suppress(Exception):
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.leave()


def presence_of(scope: MutableMapping[str, Any], receive: Receive) -> Presence:
    """Return the presence of a request's client: the one that is watched already, or a new one."""
    presence = scope.get("octavo.presence")
    if presence is None:
        presence = scope["octavo.presence"] = Presence(receive)
    return presence


async def while_present(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Return what `work` for a request returns; cancel it when the request's client leaves.

    Raises:
        ClientGoneError: the client has left.
    """
    return await presence_of(request.scope, request.receive).unless_gone(work)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found:
    """Return what `work` returns; cancel it when the client leaves.

    Raises:
        ClientGoneError: the client has left.
    """
    presence = Presence(receive)
    try:
        return await presence.unless_gone(work)
    finally:
        presence.close()
