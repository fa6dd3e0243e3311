"""The GEMM of float8 rows and weights on tensor cores, y = epilogue(x W^T); imported only where Triton runs.

The weight is the left operand: its rows fill the tensor cores' 64 or 128 lanes, and rows of x, as few as 16,
are columns. So no lane multiplies padding, and a program reads its weights once for all rows of its tile.

    weights [COLUMNS, DEPTH] x rows [DEPTH, ROWS]  ->  sums [COLUMNS, ROWS]

Scales of weight rows are multiplied into the results, those of narrower tiles into the sums of DEPTH
products. Every DEPTH products are added up in full float32, which float8 tensor cores alone do not do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.float8 import Float8Weight
from octavo.gemm.float8_operands import check_float8
from octavo.gemm.portable.float8_tiling import Float8Tiling, tiling_for
from octavo.kernels.activation import activate
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def float8_linear(
    x: Tensor,
    weight: Float8Weight,
    bias: Tensor | None = None,
    *,
    row_scales: Tensor,
    dtype: torch.dtype,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: Float8Tiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32.

    The previous kernel must not write weight, scales or bias.

    Args:
        x: [M, K] float8; rows any stride apart, last dimension contiguous.
        weight: [N, K], whose tiles the kernel has (tiling.has_tiles); with an activation [gate | up]
            along N.
        bias, activation, residual: see skinny_linear.
        row_scales: [M] float32 contiguous, in any shape, by which rows of x are to be multiplied.
        dtype: of the result.
        tiling: None: tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2].

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    out = check_float8(x, weight, bias, row_scales, dtype, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if num_rows == 0:
        return out
    if tiling is None:
        tiling = tiling_for(num_rows, num_weight_rows, size)
    depth = tiling.depth if weight.width == size else min(tiling.depth, weight.width)
    launch(
        _float8_linear_kernel,
        (-(-num_weight_rows // tiling.columns), -(-num_rows // tiling.rows)),
        x_ptr=x,
        weight_ptr=weight.values,
        scale_ptr=weight.scales,
        row_scale_ptr=row_scales,
        bias_ptr=bias,
        out_ptr=out,
        num_rows=num_rows,
        num_weight_rows=num_weight_rows,
        stride_x=x.stride(0),
        stride_out=out.stride(0),
        SIZE=size,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=depth,
        STAGES=tiling.num_stages,
        HEIGHT=weight.height,
        WIDTH=weight.width,
        ACTIVATION=activation,
        ADD=residual is not None,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_weight_rows"])
def _float8_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, row_scale_ptr, bias_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_weight_rows / COLUMNS), ceil(num_rows / ROWS)).

    With an activation, gate and up columns alternate in a program.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    EVEN: tl.constexpr = SIZE % DEPTH == 0
    TILED: tl.constexpr = WIDTH < SIZE
    start_next(OVERLAP)
    num_columns = num_weight_rows // HALVES
    index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    # Rows and columns past the end repeat the last one and are not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    weight_row = tl.minimum(index // HALVES, num_columns - 1) + index % HALVES * num_columns
    x_at = x_ptr + x_row[:, None] * stride_x + k[None, :]
    weight_at = weight_ptr + weight_row.to(tl.int64)[:, None] * SIZE + k[None, :]
    scale_at = scale_ptr + weight_row // HEIGHT * ((SIZE + WIDTH - 1) // WIDTH)
    wait_for_previous(OVERLAP)

    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_at + start)
            x = tl.load(x_at + start)
        else:
            is_k = (start + k < SIZE)[None, :]
            weight = tl.load(weight_at + start, mask=is_k, other=0.0)
            x = tl.load(x_at + start, mask=is_k, other=0.0)
        products = tl.dot(weight, tl.trans(x))
        if TILED:
            products *= tl.load(scale_at + start // WIDTH)[:, None]
        sums += products

    if not TILED:
        sums *= tl.load(scale_at)[:, None]
    sums *= tl.load(row_scale_ptr + x_row)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    column = index
    if ACTIVATION is not None:
        pairs = tl.permute(tl.reshape(sums, [COLUMNS // 2, 2, ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        sums = activate(gate, ACTIVATION) * up
        column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    out = tl.trans(sums)
    if ADD:
        out += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
