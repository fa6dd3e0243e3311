"""Threads for slow work, which senders take turns to use."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from octavo.server.api_errors import too_many_bodies

Found = TypeVar("Found")
_Turn = asyncio.Future[None]


class FairThreads:
    """A pool of threads whose time the senders of requests share. For one event loop.

    Senders take turns, whatever one of them has sent before, and no sender gets all threads: one is left for
    the next. Work that is cancelled keeps its thread until it has ended.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Start nothing yet."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._running: Counter[bytes] = Counter()
        # The waiting senders in the order of their turns, each with its turns and their bytes; none is empty.
        self._waiting: dict[bytes, dict[_Turn, int]] = {}

    async def run(
        self, sender: bytes, work: Callable[..., Found], *arguments: object, num_bytes: int = 0
    ) -> Found:
        """Run slow work for a sender in a thread.

        Args:
            sender: whose time it takes.
            work: what to run.
            arguments: of the work.
            num_bytes: what it keeps in memory while it waits; see `make_room`.

        Raises:
            ApiError: 429, it gave way to others; see `make_room`.
        """
        if self._waiting or not self._is_free_for(sender):
            await self._wait(sender, num_bytes)
        else:
            self._running[sender] += 1
        events = asyncio.get_running_loop()
        try:
            running = self._threads.submit(work, *arguments)
        except BaseException:
            self._end(sender)
            raise
        found: asyncio.Future[Found] = events.create_future()
        running.add_done_callback(partial(self._note_end, found, sender))
        return await found

    def make_room(self, sender: bytes, num_bytes: int, max_bytes: int) -> None:
        """Bound the bytes of waiting work: the sender with the most of them loses its latest pieces.

        Raises:
            ApiError: 429, if that is this sender.
        """
        waiting = Counter({other: sum(turns.values()) for other, turns in self._waiting.items()})
        while waiting.total() + num_bytes > max_bytes:
            loser = max(waiting, key=lambda other: waiting[other], default=sender)
            if waiting[loser] <= waiting[sender] + num_bytes:
                raise too_many_bodies()
            turn = next(reversed(self._waiting[loser]))
            waiting[loser] -= self._waiting[loser][turn]
            self._forget(loser, turn)
            if not turn.done():
                # Otherwise its client has just left.
                turn.set_exception(too_many_bodies())

    def start(self, work: Callable[[], Found]) -> Future[Found]:
        """Run work of the server itself, which nobody waits for."""
        return self._threads.submit(work)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_free_for(self, sender: bytes) -> bool:
        running = self._running
        return running.total() < self._num_threads and running[sender] < max(1, self._num_threads - 1)

    async def _wait(self, sender: bytes, num_bytes: int) -> None:
        """Wait until the sender gets a thread; the sender counts as running then."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, {})[turn] = num_bytes
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Its turn has just come.
                self._end(sender)
            raise
        finally:
            self._forget(sender, turn)

    def _forget(self, sender: bytes, turn: _Turn) -> None:
        turns = self._waiting.get(sender)
        if turns is not None:
            turns.pop(turn, None)
            if not turns:
                del self._waiting[sender]

    def _give_turns(self) -> None:
        """Give threads that are free to those whose turn it is."""
        while True:
            sender = next((sender for sender in self._waiting if self._is_free_for(sender)), None)
            if sender is None:
                return
            turns = self._waiting.pop(sender)
            turn = next(iter(turns))
            del turns[turn]
            if turns:
                # The sender goes to the end of the line.
                self._waiting[sender] = turns
            if not turn.done():
                self._running[sender] += 1
                turn.set_result(None)

    def _note_end(self, found: "asyncio.Future[Found]", sender: bytes, ended: "Future[Found]") -> None:
        # On a closed event loop nobody waits.
        with suppress(RuntimeError):
            found.get_loop().call_soon_threadsafe(self._finish, found, sender, ended)

    def _finish(self, found: "asyncio.Future[Found]", sender: bytes, ended: "Future[Found]") -> None:
        self._end(sender)
        if found.done():
            return
        if ended.cancelled():
            found.cancel()
        elif (error := ended.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(ended.result())

    def _end(self, sender: bytes) -> None:
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        self._give_turns()
