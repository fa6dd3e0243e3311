"""Top-k, top-p and min-p on a GPU without a sort: each is a cut, a logit below which tokens are dropped.

Scaled by the temperature first, a row keeps the tokens whose logit reaches all of

    min-p   largest + temperature * log(min_p)
    top-k   the k-th largest logit
    top-p   the highest logit c such that the tokens >= c have top_p of the mass that min-p and top-k leave

Tokens that tie with a cut are all kept, so a row may keep more than k. The top-k cut is exact; masses are
sums of float32 exponentials, so the top-p cut is exact unless a sum comes within 1e-6 of top_p.

    _find_floors, R programs -------> a cheap lower bound of each row's cut
    _collect, R x tiles programs ---> the few tokens above it
    _cut_and_draw, R programs ------> the cut, by bisection, and a token

A row with more than CAPACITY tokens above its floor (a flat distribution, or a top-k larger than the number
of groups) is bisected over all its logits, to the same result. Masses are summed in fixed point: the order
of the candidates, which is up to the machine, then cannot change a bit of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.engine.sampling.options import FILTERS
from octavo.engine.sampling.triton_bisect import highest_reaching, lowest_kept
from octavo.engine.sampling.triton_random import draw_above, inverse_temperature
from octavo.errors import InvalidArgumentError
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch

CAPACITY = 8192
# Fixed: a row must draw the same token in any batch, so the tiles may not depend on R.
TILE = 2048
# Low bits of a logit's float32 pattern that its own dtype never sets: they need no bisection.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def redraw_filtered(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filters: Sequence[Tensor],
    group_max: Tensor,
    row_mass: Tensor,
    token_ids: Tensor,
) -> None:
    """Draw the tokens of the rows that ask for a filter; other rows, greedy and bad ones stay as they are.

    Args:
        logits: [R, V], as for sample_tokens.
        temperatures: [R] float32.
        seeds: [R] int64.
        positions: [R] int32.
        filters: [R] each, as for sample_tokens.
        group_max: [R, G] contiguous float32, largest logits of each tile's groups of tokens, G a multiple of
            the number of tiles; NaN shows as +inf.
        row_mass: [R] float32, sum of exp((logit - largest logit) / temperature) of each row that is neither
            greedy nor bad.
        token_ids: [R] int32; entries of filtered rows are overwritten.

    Raises:
        InvalidArgumentError: a filter's shape or dtype does not fit.
    """
    _check(filters, logits.shape[0])
    num_rows, vocab_size = logits.shape
    device = logits.device
    bounds = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
    num_candidates = torch.empty(num_rows, dtype=torch.int32, device=device)
    candidates = torch.empty(num_rows, CAPACITY, dtype=torch.float32, device=device)
    candidate_ids = torch.empty(num_rows, CAPACITY, dtype=torch.int32, device=device)
    num_tiles, num_groups = -(-vocab_size // TILE), group_max.shape[1]
    unused_bits = _UNUSED_BITS[logits.dtype]
    top_k, top_p, min_p = filters
    launch(
        _find_floors,
        (num_rows,),
        group_max_ptr=group_max,
        temperatures_ptr=temperatures,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        bounds_ptr=bounds,
        num_candidates_ptr=num_candidates,
        vocab_size=vocab_size,
        num_groups=num_groups,
        UNUSED_BITS=unused_bits,
        GROUPS=power_of_two(num_groups),
    )
    launch(
        _collect,
        (num_rows, num_tiles),
        logits_ptr=logits,
        group_max_ptr=group_max,
        bounds_ptr=bounds,
        num_candidates_ptr=num_candidates,
        candidates_ptr=candidates,
        candidate_ids_ptr=candidate_ids,
        vocab_size=vocab_size,
        stride_row=logits.stride(0),
        CAPACITY=CAPACITY,
        GROUPS=num_groups // num_tiles,
        TILE=TILE,
    )
    launch(
        _cut_and_draw,
        (num_rows,),
        logits_ptr=logits,
        temperatures_ptr=temperatures,
        seeds_ptr=seeds,
        positions_ptr=positions,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        bounds_ptr=bounds,
        row_mass_ptr=row_mass,
        num_candidates_ptr=num_candidates,
        candidates_ptr=candidates,
        candidate_ids_ptr=candidate_ids,
        token_ids_ptr=token_ids,
        vocab_size=vocab_size,
        stride_row=logits.stride(0),
        UNUSED_BITS=unused_bits,
        CAPACITY=CAPACITY,
        CHUNK=2048,
        ROW_CHUNK=8192,
        num_warps=16,
    )


def _check(filters: Sequence[Tensor], num_rows: int) -> None:
    if len(filters) != len(FILTERS):
        names = ", ".join(option.name for option in FILTERS)
        raise InvalidArgumentError(f"filters must be the columns {names}, got {len(filters)} tensors")
    for option, column in zip(FILTERS, filters, strict=True):
        dtype = np.dtype(option.dtype).name
        if column.shape != (num_rows,) or column.dtype != getattr(torch, dtype) or not column.is_contiguous():
            raise InvalidArgumentError(
                f"filter {option.name} must be contiguous [R] = [{num_rows}] {dtype}, "
                f"got {list(column.shape)} {column.dtype}"
            )


@triton.jit
def _find_floors(
    group_max_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bounds_ptr,
    num_candidates_ptr,
    vocab_size,
    num_groups,
    UNUSED_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Grid: (R,). Writes each row's (floor, largest logit) and no candidates; floor +inf: nothing to do."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    maxima_at = group_max_ptr + row * num_groups
    maxima = tl.load(maxima_at + group, mask=group < num_groups, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_asked = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    floor = tl.full([], float("inf"), tl.float32)
    if is_asked & is_finite & (temperature > 0.0):
        width = 1.0 / inverse_temperature(temperature)
        if (top_k > 0) | (min_p > 0.0):
            # Top-p needs the mass of what these leave: nothing they leave may lie below the floor.
            floor = tl.where(min_p > 0.0, largest + width * tl.log(min_p), _LOWEST)
        else:
            # Fewer than V tokens, each below exp(largest) (1 - top_p) / V, lack the mass to be needed.
            needed = tl.log(tl.full([], vocab_size, tl.float32)) + 1.0 - tl.log(1.0 - top_p)
            floor = largest - width * needed
        # Finite, and above the -inf of tokens that are forbidden.
        floor = tl.maximum(floor, _LOWEST)
        if (top_k > 0) & (top_k <= num_groups):
            # The k-th largest group maximum: at least k tokens reach it.
            floor = highest_reaching(
                maxima_at, num_groups, floor, largest, 1.0, top_k.to(tl.float64), False, UNUSED_BITS, GROUPS
            )
    tl.store(bounds_ptr + row * 2, floor)
    tl.store(bounds_ptr + row * 2 + 1, largest)
    tl.store(num_candidates_ptr + row, 0)


@triton.jit
def _collect(
    logits_ptr,
    group_max_ptr,
    bounds_ptr,
    num_candidates_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    vocab_size,
    stride_row,
    CAPACITY: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (R, tiles). Appends the logits and ids that reach the floor, in no particular order."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    floor = tl.load(bounds_ptr + row * 2)
    maxima_at = group_max_ptr + (row * tl.num_programs(1) + tile) * GROUPS
    # Most tiles hold no candidate, and all tiles of rows that ask for nothing (floor +inf) are done here.
    if (floor < float("inf")) & (tl.max(tl.load(maxima_at + tl.arange(0, GROUPS)), axis=0) >= floor):
        token = tile * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab_size, other=float("-inf"))
        logits = logits.to(tl.float32)
        is_kept = (logits >= floor).to(tl.int32)
        start = tl.atomic_add(num_candidates_ptr + row, tl.sum(is_kept, axis=0))
        place = start + tl.cumsum(is_kept, axis=0) - 1
        fits = (is_kept > 0) & (place < CAPACITY)
        tl.store(candidates_ptr + row * CAPACITY + place, logits, mask=fits)
        tl.store(candidate_ids_ptr + row * CAPACITY + place, token, mask=fits)


@triton.jit
def _cut_and_draw(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bounds_ptr,
    row_mass_ptr,
    num_candidates_ptr,
    candidates_ptr,
    candidate_ids_ptr,
    token_ids_ptr,
    vocab_size,
    stride_row,
    UNUSED_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):
    """Grid: (R,). Bisects the candidates by CHUNK, or all logits by ROW_CHUNK if those do not fit."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(bounds_ptr + row * 2)
    if floor < float("inf"):
        largest = tl.load(bounds_ptr + row * 2 + 1)
        factor = inverse_temperature(tl.load(temperatures_ptr + row))
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        all_mass = tl.load(row_mass_ptr + row)
        # The mass that min-p and top-k leave is known beforehand only if they leave everything.
        known_mass = tl.where((top_k > 0) | (tl.load(min_p_ptr + row) > 0.0), 0.0, all_mass)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        length = tl.load(num_candidates_ptr + row)
        source = candidates_ptr + row * CAPACITY
        ids = candidate_ids_ptr + row * CAPACITY
        if length <= CAPACITY:
            cut = lowest_kept(
                source, length, floor, largest, factor, top_k, top_p, known_mass, UNUSED_BITS, CHUNK
            )
            token_id = draw_above(source, ids, length, cut, largest, factor, seed, position, True, CHUNK)
        else:
            whole = logits_ptr + row * stride_row
            cut = lowest_kept(
                whole, vocab_size, floor, largest, factor, top_k, top_p, known_mass, UNUSED_BITS, ROW_CHUNK
            )
            token_id = draw_above(
                whole, ids, vocab_size, cut, largest, factor, seed, position, False, ROW_CHUNK
            )
        tl.store(token_ids_ptr + row, token_id)
