"""A step as the scheduler plans it: requests, the tokens of each, and which prompts share it. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.request import Request
from octavo.engine.step.pace import StepTime, StepWork


class ScheduledRequest(NamedTuple):
    """One request's share of a step: its tokens start : end are computed.

    Attributes:
        request: the request.
        start: its tokens computed before.
        num_new_tokens: how many tokens of it this step computes, >= 1.
        samples: this step reaches the request's last token, so that a new one is sampled.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool

    @classmethod
    def next_of(cls, request: Request, max_tokens: int) -> "ScheduledRequest":
        """Schedule as many of a request's next tokens as the budget allows."""
        num_to_compute = request.num_tokens_to_compute
        num_new_tokens = num_to_compute if num_to_compute < max_tokens else max_tokens
        return cls(request, request.num_computed_tokens, num_new_tokens, num_new_tokens == num_to_compute)

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    Attributes:
        scheduled: requests with their new tokens.
        block_copies: (source, destination) blocks to copy before the step (copy-on-write).
        finished: requests that ended because the KV cache cannot hold one more token of them.
        num_decoding: how many of `scheduled`, the first ones, decode; the others compute prompts.
        is_read_along: somebody reads some of its tokens as they come.
        is_limited: the limit of a step's time decided how many tokens prompts got.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_decoding: int = 0
    is_read_along: bool = False
    is_limited: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)

    @property
    def work(self) -> StepWork:
        """What the step does."""
        num_keys = sum(item.end for item in self.scheduled[: self.num_decoding])
        return self.prompt_work._replace(num_decode_keys=num_keys)

    @property
    def prompt_work(self) -> StepWork:
        """What it does for prompts."""
        prompts = self.scheduled[self.num_decoding :]
        return StepWork(
            num_decode_keys=0,
            num_prompt_tokens=sum(item.num_new_tokens for item in prompts),
            num_prompt_keys=sum(item.num_new_tokens * (item.start + item.end) // 2 for item in prompts),
        )


FIRST_COME_TOKENS = 4096
"""Prompts share a step up to this many tokens; with more, no GPU computes faster."""
SHORT_STEP_S = 0.016
"""With more tokens they share it while it stays this short: a further step is one more wait for all."""


class JoinPolicy:
    """Says which prompts may join those of one step.

    Long prompts that are read along come one after the other: together, all would wait for the last one.
    Where the limit of a step's time decides, or nobody reads along, they share what fits.
    """

    def __init__(self, output: SchedulerOutput, step_time: StepTime | None) -> None:
        """Begin with a step whose decoding sequences are scheduled.

        Args:
            output: the step, which grows meanwhile.
            step_time: estimates how long it takes; None: nothing is known about that.
        """
        self._output = output
        self._step_time = step_time

    def allows(self, request: Request, num_computed_tokens: int, budget: int) -> bool:
        """Return whether a prompt may join.

        Args:
            request: its request.
            num_computed_tokens: its tokens that are in the cache.
            budget: tokens that the step may still take.
        """
        output = self._output
        if output.is_limited or not request.is_read_along:
            return True
        work = output.prompt_work
        if work.num_prompt_tokens == 0:
            return True
        num_left = request.num_tokens - num_computed_tokens
        num_tokens = work.num_prompt_tokens + num_left
        if num_left > budget or num_tokens <= FIRST_COME_TOKENS:
            return num_left <= budget
        if self._step_time is None:
            return False
        num_keys = work.num_prompt_keys + num_left * (num_computed_tokens + request.num_tokens) // 2
        joint = output.work._replace(num_prompt_tokens=num_tokens, num_prompt_keys=num_keys)
        seconds = self._step_time.seconds(joint)
        return seconds is not None and seconds <= SHORT_STEP_S
