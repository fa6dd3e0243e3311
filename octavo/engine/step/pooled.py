"""What a step computes for models that embed or classify, instead of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.step.scheduled import ScheduledRequest
from octavo.kernels.copies import to_device, to_host
from octavo.layers import Pooler
from octavo.models import Decoder

_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a step adds to a request's pooled state.

    Attributes:
        request: whose.
        is_first: it is the first part; an engine that started over begins again.
        is_last: it is the last one.
        values: [n] float32, to be added to the parts before; on the host once the step has run.
    """

    request: Request
    is_first: bool
    is_last: bool
    values: Tensor


def pooled_parts(decoder: Decoder, scheduled: Sequence[ScheduledRequest], hidden: Tensor) -> list[Pooled]:
    """Pool a step's hidden states: the last token's of each prompt that ends, or the sum over all tokens.

    Args:
        decoder: its pooler reads the states.
        scheduled: the step.
        hidden: [T or more, hidden size], the scheduled tokens' last hidden states, one after the other.
    """
    pooler, pooling = decoder.pooler, decoder.config.pooling
    assert pooler is not None
    assert pooling is not None
    ends = list(accumulate(item.num_new_tokens for item in scheduled))
    if pooling.tokens == "mean":
        parts = hidden[: ends[-1]].split([item.num_new_tokens for item in scheduled])
        sums = to_host(torch.stack([_sum(pooler, part) for part in parts]))
        return [
            Pooled(item.request, item.start == 0, item.samples, values)
            for item, values in zip(scheduled, sums, strict=True)
        ]
    done = [(item.request, end - 1) for item, end in zip(scheduled, ends, strict=True) if item.samples]
    if not done:
        return []
    rows = to_device(np.array([row for _, row in done]), hidden.device)
    return [
        Pooled(request, True, True, values)
        for (request, _), values in zip(done, to_host(pooler(hidden[rows])), strict=True)
    ]


def _sum(pooler: Pooler, hidden: Tensor) -> Tensor:
    """Sum pooled states in slices, as the plan of memory has no room for those of a whole step."""
    return torch.stack([pooler(rows).sum(0) for rows in hidden.split(_ROWS_AT_ONCE)]).sum(0)
