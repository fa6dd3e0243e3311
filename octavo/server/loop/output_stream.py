"""One request's output, read on an asyncio event loop while the engine's thread writes it.

Nothing is kept for readers: new text is cut from the output when it is read (outputs.DeltaReader). So a
reader that is slow, or never comes, costs no memory. Waiting readers are called one after the other, without
a task or a future for each:

    engine's thread   step | ring      step | ring     step | ring (one is under way: nothing)
                              '--------.        '-----.
    event loop                          wake: cut deltas and notify, one stream after the other
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from octavo.errors import InvalidArgumentError
from octavo.outputs import CompletionDelta, CompletionOutput, DeltaReader, RequestOutput
from octavo.server.loop.jobs import Job
from octavo.server.loop.stats import Histogram


class Readers:
    """The streams of one event loop that wait for news.

    Attributes:
        num_rings: rings so far; a stream that has looked since the last one need not look again.
        first_token_s: seconds to the first tokens that were read.
        gaps: tokens by the seconds since the previous one; most that are read together have the same gap.
    """

    def __init__(
        self, event_loop: asyncio.AbstractEventLoop, first_token_s: Histogram, inter_token_s: Histogram
    ) -> None:
        self._event_loop = event_loop
        self._waiting: dict[Stream, Callable[[], bool]] = {}
        self._is_rung = False
        self._inter_token_s = inter_token_s
        self.num_rings = 0
        self.first_token_s = first_token_s
        self.gaps: dict[float, int] = {}

    def ring(self) -> bool:
        """Make all streams look for news, from any thread; False if the event loop is closed."""
        self.num_rings += 1
        return self._plan_wake() if self._waiting else True

    def wait(self, stream: "Stream", notify: Callable[[], bool]) -> None:
        """Call `notify` from the event loop when the stream has news, as long as it returns True."""
        if stream in self._waiting:
            raise InvalidArgumentError(f"stream {stream.request_id!r} has a reader already")
        # It is registered before it looks, so that anything written in between rings for this stream as well.
        self._waiting[stream] = notify
        if stream.num_rings_seen != self.num_rings:
            self._plan_wake()

    def forget(self, stream: "Stream") -> None:
        """Remove a stream that no longer waits."""
        self._waiting.pop(stream, None)

    def _plan_wake(self) -> bool:
        if not self._is_rung:
            self._is_rung = True
            try:
                self._event_loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                return False
        return True

    def _wake(self) -> None:
        self._is_rung = False
        now = time.monotonic()
        for stream, notify in [*self._waiting.items()]:
            try:
                has_news = stream.look(now)
            except Exception as error:
                # The other streams must still see their news.
                stream.error, has_news = error, True
            if has_news and not notify():
                self.forget(stream)
        for seconds, num_tokens in self.gaps.items():
            self._inter_token_s.observe(seconds, num_tokens)
        self.gaps.clear()


class Stream:
    """An async iterator of what is new in one request; each item has at most one delta per completion.

    After the last delta the iterator ends, or raises the error that ended the request. Cancelling a pending
    `__anext__` loses nothing and aborts nothing. `abort`, `aclose`, leaving an `async with` block and
    dropping the stream end the request and free its blocks. For one task at a time, of the event loop that
    submitted it.

    Attributes:
        request_id: as submitted.
        prompt_token_ids: what the model reads.
        num_rings_seen: Readers.num_rings when it looked for news.
        error: why it cannot be read on although the request goes on; None: it can.
    """

    def __init__(self, job: Job, readers: Readers, abort: Callable[[Job], None]) -> None:
        self._job = job
        self._readers = readers
        self._abort = abort
        self._cutter: DeltaReader | None = None
        self._deltas: list[CompletionDelta] = []
        self._only_whole = False
        self._is_ended = False
        self._num_seen, self._seen_s = 0, job.submitted_s
        self._num_completions = job.params.n
        self.num_rings_seen = -1
        self.error: Exception | None = None
        self.request_id = job.request_id
        self.prompt_token_ids = job.token_ids.listed

    @property
    def output(self) -> RequestOutput:
        """The request so far. The engine may be writing to it, but no field ever shrinks."""
        job = self._job
        if job.output is not None:
            return job.output
        completions = [CompletionOutput(index) for index in range(job.params.n)]
        return RequestOutput(job.request_id, job.prompt, job.token_ids.listed, completions)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        if not (self._deltas or self._is_ended):
            future = asyncio.get_running_loop().create_future()
            self.when_news(partial(_end_wait, future))
            try:
                await future
            except BaseException:
                self._readers.forget(self)
                raise
        deltas = self.take()
        if not deltas:
            raise StopAsyncIteration
        return deltas

    def when_news(self, notify: Callable[[], bool]) -> None:
        """Call `notify` whenever `take` has something to return or to raise, as long as it returns True.

        It is called from the event loop, and must not raise.
        """
        self._readers.wait(self, notify)

    def take(self) -> list[CompletionDelta]:
        """Return what is new; nothing after the end.

        Raises:
            OctavoError: the error that ended the request, once all deltas were taken.
        """
        deltas, self._deltas = self._deltas, []
        if deltas:
            self._is_ended = deltas[-1].output is not None
        else:
            self._is_ended = True
            self._raise_error()
        return deltas

    async def result(self) -> RequestOutput:
        """Wait for the end, without waking for every token, and return the whole output.

        Raises:
            OctavoError: the request failed, or the engine is dead.
        """
        self._only_whole = True
        async for _ in self:
            pass
        return self.output

    def abort(self) -> None:
        """End the request; the stream then yields what there was, with finish_reason "abort". Idempotent."""
        if not (self._job.is_aborted or self._job.has_ended):
            self._abort(self._job)

    async def aclose(self) -> None:
        """End the request and the stream."""
        self.abort()
        self._deltas, self._is_ended = [], True

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.abort()

    def look(self, now: float) -> bool:
        """Cut what is new, for `take` to return; True if there is something, or the stream is over."""
        self.num_rings_seen = self._readers.num_rings
        job = self._job
        output = job.output
        if job.failure is not None:
            return True
        if output is None:
            return False
        if output.metrics.num_output_tokens > self._num_seen:
            self._observe(output.metrics.num_output_tokens, now)
        if self._only_whole and not output.finished:
            return False
        if self._cutter is None:
            self._cutter = DeltaReader(output)
        deltas = self._cutter.read()
        # A reader that was cancelled may have left some.
        self._deltas = [*self._deltas, *deltas] if self._deltas else deltas
        return bool(self._deltas)

    def _observe(self, num_tokens: int, now: float) -> None:
        """Note how long new tokens took. Those of n completions come side by side, others one by one."""
        num_new, seconds = num_tokens - self._num_seen, now - self._seen_s
        if self._num_seen == 0:
            self._readers.first_token_s.observe(seconds)
        else:
            gaps, rounds = self._readers.gaps, num_new / self._num_completions
            gap = seconds / rounds if rounds > 1 else seconds
            gaps[gap] = gaps.get(gap, 0) + num_new
        self._num_seen, self._seen_s = num_tokens, now

    def _raise_error(self) -> None:
        """Raise what ended the request, if it was an error."""
        error = self.error or self._job.failure
        if error is None and self._job.output is not None:
            error = self._job.output.error
        if error is not None:
            # Other streams raise the same error, which would collect their tracebacks and keep them alive.
            raise error.with_traceback(None)


def _end_wait(future: "asyncio.Future[None]") -> bool:
    if not future.done():
        future.set_result(None)
    return False
