"""Tiles of experts in floats, perhaps float8 with scales, as operands of the grouped GEMM.

Imported only where Triton runs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.gemm.portable.experts.expert_tiling import GroupedTiling


def describe_weight(values: Tensor, tiling: GroupedTiling) -> TensorDescriptor | None:
    """Describe the weights of all experts to TMA; what lies outside of them reads as zero."""
    if not tiling.tma:
        return None
    return TensorDescriptor.from_tensor(values.view(-1, values.shape[2]), [tiling.columns, tiling.depth])


@triton.jit
def place_floats(
    weight, expert, num_columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return pointers to a program's values and scales of gate or of all, and the first row's number."""
    OWN: tl.constexpr = COLUMNS // HALVES
    PARTS: tl.constexpr = 1 if WIDTH == 0 else (SIZE + WIDTH - 1) // WIDTH
    values_ptr, scales_ptr = weight
    # Columns past the end repeat the last one, or are those of the next weight, and are not stored.
    column = tl.minimum(tl.program_id(0) * OWN + tl.arange(0, OWN), num_columns - 1)
    row = expert * HALVES * num_columns + column
    values_at = values_ptr + row[:, None] * SIZE + tl.arange(0, DEPTH)[None, :]
    scales_at = column if WIDTH == 0 else scales_ptr + expert * PARTS * HALVES * num_columns + column
    return values_at, scales_at, (expert * HALVES * num_columns).to(tl.int32) + tl.program_id(0) * OWN


@triton.jit
def sum_floats(
    place, tiles, x_ptr, x_row, is_row, stride_x, num_columns, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the products of gate and of up [COLUMNS / HALVES, ROWS]; see grouped_gemm.

    WIDTH numbers of a row of the weight share a scale; 0: there are none.
    """
    PARTS: tl.constexpr = 1 if WIDTH == 0 else (SIZE + WIDTH - 1) // WIDTH
    values_at, scales_at, first_row = place
    up_at = values_at + num_columns.to(tl.int64) * SIZE
    x_at = x_ptr + x_row[:, None] * stride_x + tl.arange(0, DEPTH)[None, :]
    total = tl.zeros([COLUMNS // HALVES, ROWS], tl.float32)
    up_total = total
    for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        x = tl.trans(_load_rows(x_at, is_row, start, SIZE, DEPTH))
        values = _load_values(tiles, first_row, values_at, start, SIZE, DEPTH)
        part_at = scales_at if PARTS == 1 else scales_at + start // WIDTH * HALVES * num_columns
        total = _add_product(total, values, x, part_at, PARTS)
        if HALVES == 2:
            up = _load_values(tiles, first_row + num_columns, up_at, start, SIZE, DEPTH)
            up_total = _add_product(up_total, up, x, part_at + num_columns, PARTS)
    if WIDTH > 0 and PARTS == 1:
        total *= tl.load(scales_at)[:, None]
        if HALVES == 2:
            up_total *= tl.load(scales_at + num_columns)[:, None]
    return total, up_total


@triton.jit
def _load_rows(x_at, is_row, start, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Load [ROWS, DEPTH] of rows; what lies outside is 0."""
    if SIZE % DEPTH == 0:
        return tl.load(x_at + start, mask=is_row[:, None], other=0.0)
    else:
        is_k = start + tl.arange(0, DEPTH) < SIZE
        return tl.load(x_at + start, mask=is_row[:, None] & is_k[None, :], other=0.0)


@triton.jit
def _load_values(tiles, first_row, values_at, start, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Load [columns, DEPTH] of a weight, by TMA if there are `tiles`; beyond K it is 0."""
    if tiles is not None:
        return tiles.load([first_row, start])
    elif SIZE % DEPTH == 0:
        return tl.load(values_at + start)
    else:
        is_k = start + tl.arange(0, DEPTH) < SIZE
        return tl.load(values_at + start, mask=is_k[None, :], other=0.0)


@triton.jit
def _add_product(total, weight, x, scales_at, PARTS: tl.constexpr):
    """Return total + weight x. If a row has a single scale, that is applied to its sum, later.

    Tensor cores do not add products of float8 in full float32: they only add up those of one step.
    """
    if PARTS == 1 and x.dtype == tl.float8e4nv:
        return total + tl.dot(weight, x)
    elif PARTS == 1:
        return tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
    else:
        scales = tl.load(scales_at)
        return total + tl.dot(weight.to(x.dtype), x, input_precision="ieee") * scales[:, None]
