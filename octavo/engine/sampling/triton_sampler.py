"""Sampling on a GPU, straight from half-precision logits; imported only where Triton runs.

Adding Gumbel noise to logits / temperature and taking the largest draws from their softmax. Noise for a
whole vocabulary costs more than reading it, so a row draws in two steps, which is the same distribution:
first a tile of the vocabulary by the tiles' sums of exp, then a token inside that tile.

    logits [R, V] -- _tile_statistics, R x tiles programs --> per tile: maxima, sum of exp, best id
                  -- _draw, R programs ---------------------> token ids (re-reads one tile per row)

Rows with top-k, top-p or min-p are drawn again by triton_filters, launched only if filters are given.

Source: Gumbel 1954; Maddison, Tarlow and Minka 2014 (Gumbel-max).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.engine.sampling.triton_filters import TILE, redraw_filtered
from octavo.engine.sampling.triton_random import TILE_STREAM, TOKEN_STREAM, gumbel, inverse_temperature
from octavo.errors import InvalidArgumentError
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch

# Groups of tokens per tile whose maxima are kept: they bound a top-k cut.
_GROUPS = 8


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one token per row. A row's token depends on its own arguments only, never on the batch.

    Arithmetic is float32. Nothing waits for the host, so a CUDA graph can capture the call; a step without
    filters and one with them are two graphs.

    Args:
        logits: [R, V] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous; -inf
            forbids a token.
        temperatures: [R] float32. 0 is greedy: the largest logit, of equal ones the lowest id. Values below
            1e-10 count as 1e-10.
        seeds: [R] int64, at least 0.
        positions: [R] int32; (seed, position) is the key of a row's noise.
        filters: [R] each, in the order of options.FILTERS: top_k int32 (0 or less: off), top_p float32 in
            (0, 1] (1: off), min_p float32 in [0, 1] (0: off). Greedy rows ignore them. Empty: no row asks
            for any, which is faster.

    Returns:
        New (token_ids [R] int32, is_finite [R] bool). Where a row holds a NaN, +inf or nothing but -inf,
        is_finite is False and the token id 0, so that an embedding can still look it up.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    _check(logits, temperatures, seeds, positions)
    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // TILE)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return token_ids, is_finite
    group_max = torch.empty(num_rows, num_tiles * _GROUPS, dtype=torch.float32, device=logits.device)
    tile_sum = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tile_best = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    row_mass = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    shared = {
        "logits_ptr": logits,
        "temperatures_ptr": temperatures,
        "group_max_ptr": group_max,
        "tile_sum_ptr": tile_sum,
        "tile_best_ptr": tile_best,
        "vocab_size": vocab_size,
        "stride_row": logits.stride(0),
        "GROUPS": _GROUPS,
        "TILE": TILE,
    }
    launch(
        _tile_statistics,
        (num_rows, num_tiles),
        **shared,
    )
    launch(
        _draw,
        (num_rows,),
        **shared,
        seeds_ptr=seeds,
        positions_ptr=positions,
        token_ids_ptr=token_ids,
        is_finite_ptr=is_finite,
        row_mass_ptr=row_mass,
        num_tiles=num_tiles,
        TILES=power_of_two(num_tiles),
        num_warps=8,
    )
    if filters:
        redraw_filtered(logits, temperatures, seeds, positions, filters, group_max, row_mass, token_ids)
    return token_ids, is_finite


def _check(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise InvalidArgumentError(
            "logits must be [R, V] with V > 0 and a contiguous last dimension, "
            f"got shape {list(logits.shape)}, strides {list(logits.stride())}"
        )
    wanted = {"temperatures": torch.float32, "seeds": torch.int64, "positions": torch.int32}
    for (name, dtype), tensor in zip(wanted.items(), (temperatures, seeds, positions), strict=True):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{name} must be contiguous [R] = [{logits.shape[0]}] {dtype}, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )


@triton.jit
def _tile_statistics(
    logits_ptr,
    temperatures_ptr,
    group_max_ptr,
    tile_sum_ptr,
    tile_best_ptr,
    vocab_size,
    stride_row,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (R, tiles). NaN is turned into +inf, so that a row's largest maximum shows every bad value."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    # The tail of the last tile holds -inf: no maximum, no mass.
    logits = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    maxima = tl.max(tl.reshape(logits, [GROUPS, TILE // GROUPS]), axis=1)
    largest = tl.max(maxima, axis=0)
    best = tl.min(tl.where(logits == largest, token, 2147483647), axis=0)
    # An infinity minus itself would be NaN.
    origin = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    factor = inverse_temperature(tl.load(temperatures_ptr + row))
    total = tl.sum(tl.exp((logits - origin) * factor), axis=0)
    at = row * tl.num_programs(1) + tile
    tl.store(group_max_ptr + at * GROUPS + tl.arange(0, GROUPS), maxima)
    tl.store(tile_sum_ptr + at, total)
    tl.store(tile_best_ptr + at, best)


@triton.jit
def _draw(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    group_max_ptr,
    tile_sum_ptr,
    tile_best_ptr,
    token_ids_ptr,
    is_finite_ptr,
    row_mass_ptr,
    vocab_size,
    stride_row,
    num_tiles,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (R,). Writes row_mass only of rows that are finite and not greedy: nothing else reads it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    group_at = group_max_ptr + (row * num_tiles + tile)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    tile_max = tl.max(tl.load(group_at, mask=is_tile[:, None], other=float("-inf")), axis=1)
    largest = tl.max(tile_max, axis=0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    temperature = tl.load(temperatures_ptr + row)
    if is_finite & (temperature > 0.0):
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        factor = inverse_temperature(temperature)
        total = tl.load(tile_sum_ptr + row * num_tiles + tile, mask=is_tile, other=0.0)
        distance = (tile_max - largest) * factor
        tl.store(row_mass_ptr + row, tl.sum(total * tl.exp(distance), axis=0))
        noisy = distance + tl.log(total) + gumbel(seed, position, tile, TILE_STREAM)
        # A tile without any allowed token has tile_max -inf, and a sum of 0.
        chosen = tl.argmax(tl.where(tile_max > float("-inf"), noisy, float("-inf")), axis=0)
        token = chosen * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab_size, other=float("-inf"))
        noisy = (logits.to(tl.float32) - largest) * factor + gumbel(seed, position, token, TOKEN_STREAM)
        token_id = chosen * TILE + tl.argmax(noisy, axis=0)
    else:
        chosen = tl.argmax(tile_max, axis=0)
        token_id = tl.where(is_finite, tl.load(tile_best_ptr + row * num_tiles + chosen), 0)
    tl.store(token_ids_ptr + row, token_id)
    tl.store(is_finite_ptr + row, is_finite)
