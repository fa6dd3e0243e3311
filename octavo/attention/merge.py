"""Merge partial attention results over disjoint sets of keys: the specification of every kernel that merges.

docs/adr/0021-two-plans-over-one-table.md lists them.
"""

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge P partial results into the result over all of their keys.

    A partial that saw no key has lse -inf; its out is ignored, whatever it holds. If every partial is
    empty the result is 0 with lse -inf. Computed in float32 (float64 for float64 outs): with 16-bit
    maxima and sums the error would be 10,000 times larger.

    Args:
        outs: [P, T, H, D] partial outputs, each a softmax-weighted mean of values.
        lses: [P, T, H] log of each partial's sum of exponentials, natural.

    Returns:
        (out [T, H, D] in the dtype of outs, lse [T, H] in the dtype of the computation).

    Raises:
        InvalidArgumentError: the shapes do not fit.

    Source: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if outs.dim() != 4 or outs.shape[:3] != lses.shape:
        raise InvalidArgumentError(
            f"merge expects outs [P, T, H, D] and lses [P, T, H]; "
            f"got {list(outs.shape)} and {list(lses.shape)}"
        )
    dtype = torch.float64 if outs.dtype == torch.float64 else torch.float32
    lses = lses.to(dtype)
    lse = torch.logsumexp(lses, dim=0)
    # An all-empty token would ask for -inf - -inf; from 0 its weights are exp(-inf) = 0.
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    visible = torch.where(weights > 0, outs.to(dtype), 0.0)
    return (weights * visible).sum(dim=0).to(outs.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge with a key of score `sinks` and value 0 that every token sees; see ScoreOptions.

    Args:
        out: [T, H, D], float32 or float64 where the result shall be rounded only once.
        lse: [T, H], natural; -inf where a token saw no other key.
        sinks: [H], or None: nothing changes but the dtype.
        dtype: of the new out.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
    """
    if sinks is None:
        return out.to(dtype), lse
    sinks = sinks.to(lse.dtype).expand_as(lse)
    # With a sink of -inf, a row without keys stays empty.
    weight = torch.sigmoid(lse - sinks).masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    return (out * weight).to(dtype), torch.logaddexp(lse, sinks)
