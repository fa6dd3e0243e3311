"""The prompts of one HTTP request under way."""

from collections.abc import Callable, Sequence
from functools import partial

from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import CompletionDelta, RequestOutput
from octavo.server.errors import ApiError
from octavo.server.limits import Deadlines
from octavo.server.loop.stream import Stream


class Generation:
    """The prompts of one HTTP request under way.

    Attributes:
        prompts: their ids.
        streams: their outputs, in order.
        outputs: of streamed prompts that are done, by position.
        is_done: `take` has returned the ends of all prompts.
    """

    def __init__(self, prompts: Sequence[TokenIds]) -> None:
        self.prompts = prompts
        self.streams: list[Stream] = []
        self.outputs: dict[int, RequestOutput] = {}
        self.is_done = False
        self._stop_watching: Callable[[], None] | None = None
        self._timed_out = False

    def watch_queue(self, deadlines: Deadlines) -> None:
        """Abort prompts that have not begun in time."""
        self._stop_watching = partial(deadlines.end, deadlines.begin(self._end_waiting))

    def _end_waiting(self) -> None:
        if any(stream.output.metrics.first_scheduled_s is None for stream in self.streams):
            self._timed_out = True
            self.abort()

    def take(self, position: int) -> list[CompletionDelta]:
        """Return what is new of a prompt whose stream has news.

        Raises:
            OctavoError: the engine failed on it.
            ApiError: it waited too long for admission.
        """
        deltas = self.streams[position].take()
        if deltas and deltas[-1].output is not None:
            self._note_end(position, deltas[-1].output)
        return deltas

    async def finish(self) -> list[RequestOutput]:
        """Return all outputs when they are finished. Raises as `take` does."""
        try:
            outputs = [await stream.result() for stream in self.streams]
            self._check_time()
            return outputs
        finally:
            self.abort()

    def abort(self) -> None:
        """Abort the unfinished prompts. Idempotent."""
        if self._stop_watching is not None:
            self._stop_watching()
        for stream in self.streams:
            stream.abort()

    def _note_end(self, position: int, output: RequestOutput) -> None:
        self._check_time()
        if output.error is not None:
            raise output.error
        self.outputs[position] = output
        self.is_done = len(self.outputs) == len(self.streams)

    def _check_time(self) -> None:
        if self._timed_out:
            raise ApiError(
                429,
                "the server is too busy: the request was not admitted in time",
                type="rate_limit_error",
                code="queue_timeout",
                headers={"Retry-After": "5"},
            )
