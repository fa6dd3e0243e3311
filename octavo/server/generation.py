"""The prompts of one HTTP request in flight, and the tokens that they take."""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import UNSET, UnsetType

from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import CompletionDelta, RequestOutput
from octavo.server.api.structs import PromptTokensDetails, Usage
from octavo.server.api_errors import ApiError
from octavo.server.limits import Deadlines
from octavo.server.loop.output_stream import Stream


class Generation:
    """The prompts of one HTTP request in flight.

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
        """Return what is new in a prompt whose stream has news.

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


def usage_of(outputs: Sequence[RequestOutput], *, without_output: bool = False) -> Usage:
    """Return the tokens of finished prompts, each prompt counted once for its n completions.

    Args:
        outputs: those of one HTTP request.
        without_output: what was generated is not shown, so it does not count.
    """
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return _usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        0 if without_output else num_output,
        sum(output.num_cached_tokens for output in outputs),
    )


class UsageCounter:
    """Counts the tokens of a stream.

    Attributes:
        is_continuous: every event tells what was counted so far.
    """

    def __init__(self, generation: Generation, *, continuous: bool) -> None:
        """Start at zero.

        Args:
            generation: the prompts.
            continuous: every event tells what was counted so far.
        """
        self.is_continuous = continuous
        self._generation = generation
        self._num_prompt = sum(len(prompt.listed) for prompt in generation.prompts)
        self._num_output = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens that the client gets now."""
        self._num_output += num_tokens

    @property
    def now(self) -> Usage | UnsetType:
        """The usage that an event carries: what was counted so far, or nothing."""
        return _usage(self._num_prompt, self._num_output) if self.is_continuous else UNSET

    @property
    def final(self) -> Usage:
        """The usage of the whole request, once all outputs are finished."""
        cached = sum(output.num_cached_tokens for output in self._generation.outputs.values())
        return _usage(self._num_prompt, self._num_output, cached)


def _usage(num_prompt: int, num_output: int, num_cached: int | None = None) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=UNSET if num_cached is None else PromptTokensDetails(num_cached),
    )
