"""A step as the scheduler plans it and a runner runs it: requests, and the tokens of each. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.request import Request
from octavo.engine.step.time import StepWork


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
