"""Sampling on a GPU, straight from half-precision logits; imported only where Triton runs.

Adding Gumbel noise to logits / temperature and taking the largest draws from their softmax. Noise for a
whole vocabulary costs far more than reading it, so a row draws in two steps, which is the same in
distribution: first a tile of the vocabulary by the tiles' log-sum-exps, then a token inside that tile.

    logits [R, V]  --_tile_statistics, R x tiles programs-->  per tile: maxima, best id, sum of exp
                   --_draw, R programs-->                     token ids (re-reads one tile per row)

Rows with top-k, top-p or min-p take two more launches (triton_filters), made only if filters are given.

Source: Gumbel 1954; Maddison, Tarlow and Minka 2014 (Gumbel-max); Salmon et al. 2011 (Philox).
"""

# Triton's hints know neither launch options nor plain values for constexpr, nor that kernels call each other.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.engine.triton_filters import (
    FilterState,
    SamplingFilters,
    candidate_floor,
    draw_filtered,
)
from octavo.engine.triton_random import TILE_STREAM, TOKEN_STREAM, inverse_temperature, minus_log_exponential
from octavo.errors import InvalidArgumentError

# Fixed: a row must draw the same token whatever the batch, so nothing here may depend on R.
_TILE = 2048
_GROUPS = 8


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filters: SamplingFilters | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; the draw depends on the row's logits, options, seed and position only.

    A greedy row takes the lowest id among its largest logits. All arithmetic is float32. Nothing waits
    for the host, so it can be captured in a CUDA graph; filters=None and filters given are two graphs.

    Args:
        logits: [R, V] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous; -inf
            forbids a token.
        temperatures: [R] float32; 0: greedy. Below 1e-10 it counts as 1e-10.
        seeds: [R] int64, at least 0.
        positions: [R] int32, of the token to sample; (seed, position) is the key of a row's noise.
        filters: top-k, top-p and min-p of every row; None: no row asks for any, which is faster.

    Returns:
        (token_ids [R] int32, is_finite [R] bool): where a row's logits hold a NaN or +inf or nothing but
        -inf, is_finite is False and the token id is 0, so that it can still be fed to an embedding.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    _check(logits, temperatures, seeds, positions)
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return token_ids, is_finite
    group_max = torch.empty(num_rows, num_tiles, _GROUPS, dtype=torch.float32, device=device)
    tile_sum = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    tile_best = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    _tile_statistics[(num_rows, num_tiles)](
        logits, temperatures, group_max, tile_sum, tile_best, vocab_size, logits.stride(0), num_tiles,
        GROUPS=_GROUPS, TILE=_TILE,
    )  # fmt: skip
    state = None if filters is None else FilterState.empty(num_rows, device)
