"""The GEMM of 17 to 256 rows with a packed weight, y = epilogue(x W^T); imported only where Triton runs.

Each program multiplies a tile of rows by a tile of the weight on tensor cores. It loads a span of words at a
time, dequantises it in registers, and multiplies each plane by its 32 columns of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.packed import PLANE, PackedWeight
from octavo.gemm.portable.packed.dequantise import read_pair, scaled
from octavo.gemm.portable.packed.packed_operands import check_packed
from octavo.gemm.portable.packed.packed_tiling import MediumTiling, medium_tiling_for
from octavo.gemm.portable.sum_parts import add_parts
from octavo.kernels.activation import activate
from octavo.kernels.device import shared_bytes
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def medium_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: MediumTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32, weights are rounded to the dtype of x.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x: [M, K] float16 or bfloat16, columns in the weight's order; rows any stride apart.
        weight: [N, K]; with an activation [gate | up] along N.
        bias, activation, residual: see skinny.skinny_linear.
        tiling: None: medium_tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    out = check_packed(x, weight, bias, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if tiling is None:
        tiling = medium_tiling_for(num_rows, num_weight_rows, shared_bytes(x.device))
    splits = min(tiling.num_splits, weight.words.shape[1] // PLANE)
    is_whole = splits == 1
    parts = out if is_whole else x.new_empty(splits, num_rows, num_weight_rows, dtype=torch.float32)
    launch(
        _medium_linear_kernel,
        (-(-num_weight_rows // tiling.columns), -(-num_rows // tiling.rows), splits),
        x_ptr=x,
        words_ptr=weight.words,
        pairs_ptr=weight.pairs,
        bias_ptr=bias if is_whole else None,
        out_ptr=parts,
        num_rows=num_rows,
        num_weight_rows=num_weight_rows,
        stride_x=x.stride(0),
        stride_out=parts.stride(-2),
        factor=weight.factor,
        SIZE=size,
        BITS=weight.bits,
        GROUP=weight.group,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        SPLITS=splits,
        ACTIVATION=activation if is_whole else None,
        ADD=is_whole and residual is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap_options(x),
    )
    return out if is_whole else add_parts(parts, bias, out, activation, adds=residual is not None)


@triton.jit(do_not_specialize=["num_rows", "num_weight_rows", "factor"])
def _medium_linear_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, factor,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_weight_rows / COLUMNS), ceil(num_rows / ROWS), SPLITS).

    With an activation, the first half of a program's columns is gate, the other one up. With SPLITS, out is
    [SPLITS, num_rows, num_weight_rows] float32.
    """
    SPAN: tl.constexpr = 32 * 32 // BITS
    NUM_SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    EACH: tl.constexpr = (NUM_SPANS + SPLITS - 1) // SPLITS
    PLANES: tl.constexpr = GROUP // 32 if GROUP > 32 else 1
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    start_next(OVERLAP)
    num_columns = num_weight_rows // HALVES
    index = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * (COLUMNS // HALVES) + index % (COLUMNS // HALVES)
    # Rows and columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(column, num_columns - 1) + index // (COLUMNS // HALVES) * num_columns
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, 32)
    words_at = words_ptr + weight_row.to(tl.int64)[:, None] * (NUM_SPANS * 32) + j[None, :]
    x_at = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * stride_x + j[:, None]
    wait_for_previous(OVERLAP)

    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for turn in range(EACH):
        # Spans past the end repeat the last one, and meet zeros.
        span = tl.program_id(2) * EACH + turn
        known = tl.minimum(span, NUM_SPANS - 1)
        words = tl.load(words_at + known * 32)
        for group in tl.static_range(SPAN // (GROUP if GROUP > 32 else 32)):
            k = span * SPAN + group * PLANES * 32
            known_k = known * SPAN + group * PLANES * 32
            of_group = ((known_k + j) // GROUP)[None, :] if GROUP < 32 else known_k // GROUP
            scale, low = read_pair(
                tl.load(pairs_ptr + of_group * num_weight_rows + weight_row[:, None]), BITS
            )
            for plane in tl.static_range(PLANES):
                x = tl.load(x_at + k + plane * 32, mask=(k + plane * 32 + j < SIZE)[:, None], other=0.0)
                values = scaled(words, group * PLANES + plane, scale, low, BITS).to(x.dtype)
                sums = tl.dot(values, x, sums)

    sums *= factor
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    first = tl.program_id(0) * (COLUMNS // HALVES)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, COLUMNS // 2, ROWS]), (1, 2, 0)))
        sums = activate(gate, ACTIVATION) * up
    column = first + tl.arange(0, COLUMNS // HALVES)
    inside = (column < num_columns)[:, None] & (row < num_rows)[None, :]
    out_at = out_ptr + row.to(tl.int64)[None, :] * stride_out + column[:, None]
    if SPLITS > 1:
        out_at += tl.program_id(2).to(tl.int64) * num_rows * num_weight_rows
    if ADD:
        sums += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)
