"""What programs of all grouped GEMMs share: which rows a tile has, and how its results are stored.

A program has a tile of columns of an expert. It walks over the expert's tiles of rows, some tiles apart.
"""

import triton
import triton.language as tl

from octavo.kernels.activation import gate_and_up


@triton.jit
def rows_of_tile(
    pairs_ptr, first, end, NUM_CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr
):
    """Return, for the pairs from `first` on, whether each is below `end`, its row of x and of the result.

    With an activation, x has rows of tokens and the result rows of sorted pairs; else the other way round.
    """
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    pair = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64)
    if ACTIVATION is None:
        return is_row, place.to(tl.int64), pair
    else:
        return is_row, pair // NUM_CHOSEN, place


@triton.jit
def tile_weight_rows(index, num_columns, COLUMNS: tl.constexpr, HALVES: tl.constexpr):
    """Return the rows of a weight that a program has: of gate, then of up; or plain ones.

    Those past the end repeat the last one and are not stored.
    """
    OWN: tl.constexpr = COLUMNS // HALVES
    column = tl.program_id(0) * OWN + index % OWN
    return tl.minimum(column, num_columns - 1) + index // OWN * num_columns


@triton.jit
def store_tile(
    total, up_total, bias_ptr, weight_row, out_ptr, out_row, is_row, column, num_columns,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add biases to sums [COLUMNS, ROWS], combine gate and up where there is an activation, and store."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            up_total += tl.load(bias_ptr + weight_row + num_columns).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        total = gate_and_up(total, up_total, ACTIVATION)
    out_at = out_ptr + out_row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inside = is_row[:, None] & (column < num_columns)[None, :]
    tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)
