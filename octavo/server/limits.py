"""Limits on a client's time, and the end of its work when it leaves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Send

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Found = TypeVar("Found")


class ClientGoneError(Exception):
    """The client left or stopped reading, so there is nobody to answer."""


class Deadlines:
    """Calls functions after a fixed time, the same for all, unless they are cancelled before.

    asyncio's own timers are Python objects in a sorted heap: with hundreds of requests they are a tenth of
    what a request takes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The calls in the order in which they are due.
        self._calls: dict[int, tuple[float, Callable[[], None]]] = {}
        # The calls that the event loop is about to make.
        self._due: dict[int, Callable[[], None]] = {}
        self._num_begun = 0
        # The event loop that has a timer of ours.
        self._looks_in: asyncio.AbstractEventLoop | None = None

    def begin(self, call: Callable[[], None]) -> int:
        """Call a function when the time is over; return the number by which `end` prevents it."""
        self._num_begun += 1
        self._calls[self._num_begun] = time.monotonic() + self._timeout_s, call
        if self._looks_in is not asyncio.get_running_loop():
            self._look_after(self._timeout_s)
        return self._num_begun

    def end(self, number: int) -> None:
        """Cancel a call. Idempotent."""
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
            # The function's error must not end this loop.
            asyncio.get_running_loop().call_soon(self._call, number)

    def _call(self, number: int) -> None:
        call = self._due.pop(number, None)
        if call is not None:
            call()


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
    """Tracks whether a request's client is still there. Once its body was read, all that it can do is leave.

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
        """Treat the client as gone."""
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


async def send_body(send: Send, piece: bytes, timeout_s: float, *, more: bool) -> None:
    """Send a piece of an answer's body.

    Raises:
        ClientGoneError: the client did not read in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": piece, "more_body": more})
    except TimeoutError:
        raise ClientGoneError from None
