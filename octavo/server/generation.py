"""The prompts of one HTTP request under way."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from octavo.engine.prompts import TokenIds
from octavo.outputs import CompletionDelta, RequestOutput
from octavo.server.errors import ApiError
from octavo.server.loop.stream import Stream


class Generation:
    """The prompts of one HTTP request under way.

    Attributes:
        prompts: their ids.
        streams: their outputs, in order.
        outputs: of streamed prompts that are done, by position.
    """

    def __init__(self, prompts: Sequence[TokenIds]) -> None:
        self.prompts = prompts
        self.streams: list[Stream] = []
        self.outputs: dict[int, RequestOutput] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timed_out = False

    def watch_queue(self, timeout_s: float) -> None:
        """Abort prompts that have not begun after `timeout_s`; 0: never."""
        if timeout_s:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end_waiting)

    def _end_waiting(self) -> None:
        if any(stream.output.metrics.first_scheduled_s is None for stream in self.streams):
            self._timed_out = True
            self.abort()

    async def deltas(self) -> AsyncIterator[tuple[int, list[CompletionDelta]]]:
        """Yield (position of the prompt, what is new); any prompt may come next.

        Raises:
            OctavoError: the engine failed on one of them.
            ApiError: they waited too long for admission.
        """
        try:
            if len(self.streams) == 1:
                # A direct loop: every layer of generators costs as much as writing an event.
                async for deltas in self.streams[0]:
                    if deltas[-1].output is not None:
                        self._note_end(0, deltas[-1].output)
                    yield 0, deltas
            else:
                async for item in self._many():
                    yield item
        finally:
            self.abort()

    async def finish(self) -> list[RequestOutput]:
        """Return all outputs when they are finished. Raises as `deltas` does."""
        try:
            outputs = [await stream.result() for stream in self.streams]
            self._check_time()
            return outputs
        finally:
            self.abort()

    def abort(self) -> None:
        """Abort the unfinished prompts. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self.streams:
            stream.abort()

    async def _one(self, position: int) -> AsyncIterator[list[CompletionDelta]]:
        async for deltas in self.streams[position]:
            if deltas[-1].output is not None:
                self._note_end(position, deltas[-1].output)
            yield deltas

    def _note_end(self, position: int, output: RequestOutput) -> None:
        self._check_time()
        if output.error is not None:
            raise output.error
        self.outputs[position] = output

    def _check_time(self) -> None:
        if self._timed_out:
            raise ApiError(
                429,
                "the server is too busy: the request was not admitted in time",
                type="rate_limit_error",
                code="queue_timeout",
                headers={"Retry-After": "5"},
            )

    async def _many(self) -> AsyncIterator[tuple[int, list[CompletionDelta]]]:
        # A single place, so that a slow reader makes all of them wait; waiting costs no memory.
        queue: asyncio.Queue[tuple[int, list[CompletionDelta] | BaseException | None]] = asyncio.Queue(1)

        async def pump(position: int) -> None:
            try:
                async for deltas in self._one(position):
                    await queue.put((position, deltas))
                await queue.put((position, None))
            except Exception as error:
                await queue.put((position, error))

        tasks = [asyncio.ensure_future(pump(position)) for position in range(len(self.streams))]
        try:
            left = len(tasks)
            while left:
                position, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield position, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
