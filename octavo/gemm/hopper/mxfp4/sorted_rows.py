"""Rows of x in the order of their experts, and the tiles of those; imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.padded_rows import new_rows

_BLOCK = 1024


def sort_rows(x: Tensor, by_expert: SortedPairs, rows: int) -> tuple[Tensor, Tensor]:
    """Return each pair's row of x, and the tiles of an expert's rows.

    Args:
        x: [T, K], last dimension contiguous.
        by_expert: T k pairs, sorted.
        rows: height of a tile.

    Returns:
        [T k, K] contiguous: row i is that of pair i as sorted; rows of no expert are not set. And int32
        [tiles + 1, 4]: first the number of tiles, then for each tile its expert, its first row and the end of
        the expert's rows. The list has room for any choice of experts; the rest of it is not set.
    """
    num_pairs, size = len(by_expert.pairs), x.shape[1]
    num_experts = len(by_expert.starts) - 1
    sorted_x = new_rows(x, num_pairs, size)
    tiles = by_expert.starts.new_empty(min(num_pairs, num_pairs // rows + num_experts) + 1, 4)
    launch(
        _sort_rows_kernel,
        (num_pairs + 1,),
        x_ptr=x,
        out_ptr=sorted_x,
        pairs_ptr=by_expert.pairs,
        starts_ptr=by_expert.starts,
        tiles_ptr=tiles,
        num_experts=num_experts,
        size=size,
        stride_x=x.stride(0),
        NUM_CHOSEN=by_expert.num_chosen,
        ROWS=rows,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=_BLOCK,
        **overlap_options(x),
    )
    return sorted_x, tiles


@triton.jit
def _sort_rows_kernel(
    x_ptr, out_ptr, pairs_ptr, starts_ptr, tiles_ptr, num_experts, size, stride_x,
    NUM_CHOSEN: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (pairs + 1,). The first program lists the tiles, each other one copies a row."""
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
    if tl.program_id(0) == 0:
        _list_tiles(starts_ptr, tiles_ptr, num_experts, ROWS, EXPERTS)
    else:
        place = tl.program_id(0) - 1
        if place < tl.load(starts_ptr + num_experts):
            row = (tl.load(pairs_ptr + place) // NUM_CHOSEN).to(tl.int64)
            for first in range(0, size, BLOCK):
                column = first + tl.arange(0, BLOCK)
                numbers = tl.load(x_ptr + row * stride_x + column, mask=column < size)
                tl.store(out_ptr + place.to(tl.int64) * size + column, numbers, mask=column < size)


@triton.jit
def _list_tiles(starts_ptr, tiles_ptr, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Write the list of tiles: those of an expert one after the other."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    start = tl.load(starts_ptr + expert, mask=is_expert, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=is_expert, other=0)
    number = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(number, axis=0)
    tl.store(tiles_ptr, tl.sum(number, axis=0))
    tile_at = tiles_ptr + 4 + (last - number) * 4
    for tile in range(0, tl.max(number, axis=0)):
        is_tile = tile < number
        tl.store(tile_at + tile * 4, expert, mask=is_tile)
        tl.store(tile_at + tile * 4 + 1, start + tile * ROWS, mask=is_tile)
        tl.store(tile_at + tile * 4 + 2, end, mask=is_tile)
