"""The grouped GEMM over MXFP4 experts; imported only where Triton runs.

Programs and their order are those of grouped. A tile of a weight is loaded as units, which become numbers of
the dtype of x in registers, where tensor cores find them: plane after plane, each times columns of its own.
That is exact, as long as the dtype has the exponent.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gpu.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.tiling import GroupedTiling
from octavo.layers.moe.triton.mxfp4 import UNITS, first_columns, numbers, powers
from octavo.layers.moe.triton.sort import SortedPairs
from octavo.layers.triton.activation import gate_and_up


def grouped_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: GroupedTiling,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; see grouped.grouped_gemm."""
    num_experts, num_weight_rows, size = weight.shape
    num_columns = num_weight_rows // (1 if activation is None else 2)
    out = x.new_empty(len(by_expert.pairs), num_columns)
    launch(
        _grouped_kernel,
        (-(-num_columns // tiling.columns), by_expert.num_slots, num_experts),
        *(x, weight.values, weight.exponents, weight.bias, out),
        *(by_expert.pairs, by_expert.starts, num_columns, x.stride(0), by_expert.num_slots),
        *(by_expert.num_chosen, size // 4, activation, tiling.rows, tiling.columns, tiling.depth // 4),
        tiling.num_stages,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.jit
def _load_rows(x_at, is_row, unit, start, PLANE: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Load the columns [DEPTH, ROWS] of rows that meet a plane of units from `start` on."""
    x_at += 4 * start + PLANE * UNITS
    if SIZE % DEPTH == 0:
        return tl.trans(tl.load(x_at, mask=is_row[:, None], other=0.0))
    else:
        is_unit = start + unit < SIZE
        return tl.trans(tl.load(x_at, mask=is_row[:, None] & is_unit[None, :], other=0.0))


@triton.jit
def _load_part(at, index, start, SIZE: tl.constexpr):
    """Load [COLUMNS, n] of what rows of SIZE have from `start` on; beyond the end it is 0."""
    return tl.load(at + start, mask=(start + index < SIZE)[None, :], other=0)


@triton.jit
def _add_product(total, units, exponents, x0, x1, x2, x3):
    """Return total [COLUMNS, ROWS] + weight x; units [COLUMNS, D], each plane's columns of x [D, ROWS]."""
    DTYPE: tl.constexpr = x0.dtype
    # By so many powers of two numbers are too small. No exponent is above 128.
    SHIFT: tl.constexpr = 14 if DTYPE.is_fp16() else 126
    scales = powers(exponents, SHIFT).to(DTYPE)[:, :, None]
    scales = tl.broadcast_to(scales, [units.shape[0], units.shape[1] // UNITS, UNITS])
    scales = tl.reshape(scales, [units.shape[0], units.shape[1]])
    total = tl.dot(numbers(units, 0, DTYPE) * scales, x0, total, input_precision="ieee")
    total = tl.dot(numbers(units, 1, DTYPE) * scales, x1, total, input_precision="ieee")
    total = tl.dot(numbers(units, 2, DTYPE) * scales, x2, total, input_precision="ieee")
    return tl.dot(numbers(units, 3, DTYPE) * scales, x3, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_kernel(
    x_ptr, values_ptr, exponents_ptr, bias_ptr, out_ptr,
    pairs_ptr, starts_ptr, num_columns, stride_x, num_slots,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E). With an activation x has tokens' rows, else sorted pairs' rows.

    SIZE and DEPTH count units of a row of the weight. Exponents are loaded one turn ahead: they are too few
    bytes for a copy that runs by itself.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    BLOCKS: tl.constexpr = SIZE // UNITS
    start_next(OVERLAP)
    expert = tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.arange(0, DEPTH)
    block = tl.arange(0, DEPTH // UNITS)
    # Columns past the end repeat the last one, and are not stored.
    weight_row = expert.to(tl.int64) * HALVES * num_columns + tl.minimum(column, num_columns - 1)
    up_row = weight_row + num_columns
    values_at = values_ptr + weight_row[:, None] * SIZE + unit[None, :]
    up_values_at = values_ptr + up_row[:, None] * SIZE + unit[None, :]
    exponents_at = exponents_ptr + weight_row[:, None] * BLOCKS + block[None, :]
    up_exponents_at = exponents_ptr + up_row[:, None] * BLOCKS + block[None, :]
    wait_for_previous(OVERLAP)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
    end = tl.load(starts_ptr + expert + 1)
    for tile in range(first, end, num_slots * ROWS):
        place = tile + tl.arange(0, ROWS)
        is_row = place < end
        pair = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64)
        x_row = place.to(tl.int64) if ACTIVATION is None else pair // NUM_CHOSEN
        x_at = x_ptr + x_row[:, None] * stride_x + first_columns(unit)[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        up_total = total
        exponents = _load_part(exponents_at, block, 0, BLOCKS)
        up_exponents = exponents
        if HALVES == 2:
            up_exponents = _load_part(up_exponents_at, block, 0, BLOCKS)
        for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
            x0 = _load_rows(x_at, is_row, unit, start, 0, SIZE, DEPTH)
            x1 = _load_rows(x_at, is_row, unit, start, 1, SIZE, DEPTH)
            x2 = _load_rows(x_at, is_row, unit, start, 2, SIZE, DEPTH)
            x3 = _load_rows(x_at, is_row, unit, start, 3, SIZE, DEPTH)
            next_block = (start + DEPTH) // UNITS
            units = _load_part(values_at, unit, start, SIZE)
            next_exponents = _load_part(exponents_at, block, next_block, BLOCKS)
            total = _add_product(total, units, exponents, x0, x1, x2, x3)
            exponents = next_exponents
            if HALVES == 2:
                up_units = _load_part(up_values_at, unit, start, SIZE)
                next_up = _load_part(up_exponents_at, block, next_block, BLOCKS)
                up_total = _add_product(up_total, up_units, up_exponents, x0, x1, x2, x3)
                up_exponents = next_up
        if bias_ptr is not None:
            total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
            if HALVES == 2:
                up_total += tl.load(bias_ptr + up_row).to(tl.float32)[:, None]
        if HALVES == 2:
            total = gate_and_up(total, up_total, ACTIVATION)
        out_row = pair if ACTIVATION is None else place.to(tl.int64)
        out_at = out_ptr + out_row[:, None] * num_columns + column[None, :]
        inside = is_row[:, None] & (column < num_columns)[None, :]
        tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)
