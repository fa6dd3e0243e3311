"""The interface between the engine and what runs its steps: StepRunner, and the StepResult it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.attention import KVCache
from octavo.attention.plan.prefix_forest import Sharing
from octavo.engine.request import Request
from octavo.engine.sampling.sampler import SampledToken
from octavo.engine.sampling.tops import Tops
from octavo.engine.step.pooled import Pooled
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.models import Decoder

PrepareProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens one step computed.

    Attributes:
        request: whose prompt.
        start: prompt position of the first entry.
        tops: of each position, the prompt's own token included; read them when the step has run.
    """

    request: Request
    start: int
    tops: Tops


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's tokens and log-probabilities.

    Attributes:
        sampled: one entry per scheduled request whose last token was reached.
        prompt_logprobs: chunks of prompt log-probabilities.
        pooled: what there is in their place for a model that embeds or classifies.
    """

    sampled: dict[Request, SampledToken]
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Sequence[Pooled] = ()


class LateWork(NamedTuple):
    """Work that steps had to do, although it could have been done before the engine was ready.

    Attributes:
        compiled: kernels compiled or loaded, those of other engines in this process included.
        captured: CUDA graphs.
        allocated: blocks of memory requested from the driver, on the device or pinned on the host,
            likewise.
    """

    compiled: int = 0
    captured: int = 0
    allocated: int = 0


class StepRunner(Protocol):
    """Runs the model on scheduled steps.

    ModelRunner runs on any device, GpuRunner on NVIDIA GPUs; LeaderRunner runs one of these on several ranks.

    Attributes:
        decoder: the network.
        kv_cache: its cache.
        runs_ahead: `launch` returns before the device has run the step, and the next step may be launched
            at once, even if its input tokens are those that this one will sample.
    """

    decoder: Decoder
    kv_cache: KVCache
    runs_ahead: bool

    def prepare(self, progress: PrepareProgress) -> None:
        """Do now what steps would have to wait for: compile, capture, allocate.

        Args:
            progress: called with (task, number done, number in all).
        """
        ...

    def note_ready(self) -> None:
        """Start counting anew what `late_work` and `sharing` return."""
        ...

    def late_work(self) -> LateWork:
        """Return what steps had to wait for since `note_ready`."""
        ...

    def sharing(self) -> Sharing:
        """Return what sharing has saved since `note_ready`."""
        ...

    def launch(self, step: SchedulerOutput) -> Callable[[], StepResult]:
        """Start a step; the returned function waits for its result."""
        ...

    def has_finished(self) -> bool:
        """Return whether all that was launched has run: waiting for results would take no time."""
        ...

    def release(self, request: Request) -> None:
        """Forget a finished request."""
        ...

    def reset(self) -> None:
        """Forget every request and every step in flight; whatever is read next is written first."""
        ...

    def close(self) -> None:
        """Release what keeps other ranks from ending; nothing runs afterwards. Idempotent."""
        ...
