"""What a step gives back, and what the engine asks of whoever runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.attention import KVCache
from octavo.engine.request import Request
from octavo.engine.sampling.sampler import SampledToken, Top
from octavo.engine.scheduler import SchedulerOutput
from octavo.models import Decoder


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens one step computed.

    Attributes:
        request: whose prompt.
        start: prompt position of the first entry.
        tops: per position (token id, log-probability, rank) tuples, the prompt's own token included.
    """

    request: Request
    start: int
    tops: list[Top]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found.

    Attributes:
        sampled: one entry per scheduled request whose last token was reached.
        prompt_logprobs: chunks of prompt log-probabilities.
    """

    sampled: dict[Request, SampledToken]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class StepRunner(Protocol):
    """Runs the model.

    Attributes:
        decoder: the network.
        kv_cache: its cache.
        runs_ahead: `launch` returns before the step is done, and takes the next step, whose input tokens
            may be the outcome of this one.
    """

    decoder: Decoder
    kv_cache: KVCache
    runs_ahead: bool

    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """Start a step; the returned function waits for its result."""
        ...

    def release(self, request: Request) -> None:
        """Forget a finished request."""
        ...

    def reset(self) -> None:
        """Forget every request and every step under way: all blocks will be written again."""
        ...
