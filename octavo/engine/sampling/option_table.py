"""What requests ask of sampling, in one table: which options kernels read, and which change the logits first.

On a GPU a CUDA graph samples from the device's rows. Options that change logits, and log-probabilities, are
launched around it, only for the requests that ask. Nothing waits for the host.

An option that kernels read is a row of OPTIONS and an argument of those kernels: rows on the device and graph
variants follow. One that changes logits is a row, and a few lines in Sampler.

Imports no torch: requests are built from it.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from octavo.sampling_params import SamplingParams


class SampledRequest(Protocol):
    """The part of a Request that options are read from; see Request."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    prompt_logprobs_start: int | None


class Path(enum.Enum):
    """What an option needs once a request asks for it.

    Attributes:
        DRAW: kernels read it for every token.
        FILTER: kernels read it where they filter: steps without any filter launch fewer kernels.
        ADJUST: the logits of its row change before the draw.
        REPORT: log-probabilities are read.
    """

    DRAW = enum.auto()
    FILTER = enum.auto()
    ADJUST = enum.auto()
    REPORT = enum.auto()


class Option(NamedTuple):
    """One thing a request can ask of sampling.

    Attributes:
        name: of the kernels' column, or of the user's parameter.
        path: what it needs.
        neutral: the value that asks for nothing.
        read: returns the value of a request.
        dtype: of the column on the device; void where there is none.
    """

    name: str
    path: Path
    neutral: float | None
    read: Callable[[SampledRequest], Any]
    dtype: type[np.generic] = np.void


def _temperature(request: SampledRequest) -> float:
    """Return the temperature; 0 means greedy, as does every parameter below a small bound."""
    return 0.0 if request.params.greedy else request.params.temperature


def _signed_seed(request: SampledRequest) -> int:
    """Return the 64 bits of the seed, which is unsigned, as an int64."""
    return (request.seed + 2**63) % 2**64 - 2**63


# DRAW before FILTER: gather_parameters and sample_tokens take the columns in this order.
OPTIONS = (
    Option("temperatures", Path.DRAW, 0.0, _temperature, np.float32),
    Option("seeds", Path.DRAW, 0, _signed_seed, np.int64),
    # The position that yields a request's first output token; draws are keyed by the distance to it.
    Option("first_positions", Path.DRAW, 0, lambda r: r.num_prompt_tokens - 1, np.int32),
    Option("top_k", Path.FILTER, 0, lambda r: max(0, r.params.top_k), np.int32),
    Option("top_p", Path.FILTER, 1.0, lambda r: r.params.top_p, np.float32),
    Option("min_p", Path.FILTER, 0.0, lambda r: r.params.min_p, np.float32),
    Option("logprobs", Path.REPORT, None, lambda r: r.params.logprobs),
    Option("prompt_logprobs", Path.REPORT, None, lambda r: r.prompt_logprobs_start),
    Option("logit_bias", Path.ADJUST, None, lambda r: r.params.logit_bias or None),
    Option("repetition_penalty", Path.ADJUST, 1.0, lambda r: r.params.repetition_penalty),
    Option("presence_penalty", Path.ADJUST, 0.0, lambda r: r.params.presence_penalty),
    Option("frequency_penalty", Path.ADJUST, 0.0, lambda r: r.params.frequency_penalty),
    Option("min_tokens", Path.ADJUST, 0, lambda r: r.params.min_tokens),
    Option("structured", Path.ADJUST, None, lambda r: r.params.structured),
)

COLUMNS = tuple(option for option in OPTIONS if option.path in (Path.DRAW, Path.FILTER))
"""Options that kernels read: SamplingRows has a column of each."""

FILTERS = tuple(option for option in OPTIONS if option.path is Path.FILTER)
"""Options that drop tokens before the draw."""

_ADJUSTMENTS = tuple(option for option in OPTIONS if option.path is Path.ADJUST)


def adjustments(request: SampledRequest) -> tuple[str, ...]:
    """Return the names of the options by which a request changes its logits."""
    return tuple(option.name for option in _ADJUSTMENTS if option.read(request) != option.neutral)


def asks_for_filters(request: SampledRequest) -> bool:
    """Return True when a draw has to filter; a greedy request has nothing to filter."""
    if request.params.greedy:
        return False
    return any(option.read(request) != option.neutral for option in FILTERS)
