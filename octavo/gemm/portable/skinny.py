"""The skinny GEMM, for 1 to 4 rows: y = epilogue(prologue(x) W^T); imported only where Triton runs.

With so few rows a GEMM takes as long as a launch and reading the weights. So norms, activations and the
residual sum are fused into it:

    prologue   RMS norm of x: its weight is multiplied in while x is loaded, its 1 / rms into the results
    epilogue   + bias; gated activation of [gate | up], or sum into the residual stream, in place

A program reads its rows of the weight once and multiplies each with all rows of x in float32, without tensor
cores. A row's result depends on its own values, on the tiling and on the number of rows, rounded up to a
power of two, never on what the other rows hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.operands import check_operands, check_vector, make_result
from octavo.gemm.portable.skinny_tiling import MAX_ROWS, Tiling, tiling_for
from octavo.kernels.activation import activate
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def skinny_linear(
    x: Tensor,
    weight: Tensor | Float8Weight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); sums are float32.

    The previous kernel must not write weight, bias or norm_weight: this one may read them while that one
    runs.

    Args:
        x: [M, K] bfloat16, float16 or float32, 1 <= M <= MAX_ROWS; rows any stride apart, last dimension
            contiguous.
        weight: [N, K] contiguous, dtype of x or float8; with an activation [gate | up] along N. The tiles of
            float8 weights are a multiple of 8 columns wide.
        bias: [N] contiguous, or None.
        norm_weight: [K] contiguous, any floating dtype: x / rms(x) * norm_weight takes the place of x; None:
            no norm.
        eps: added to the mean square of a row of x.
        activation: "silu", "gelu" or "gelu_tanh": the result is activation(gate) * up, N / 2 columns.
        residual: [M, N] dtype of x, rows any stride apart, last dimension contiguous, not overlapping x: the
            result is added to it; not together with an activation.
        dtype: of a result without residual; None: that of x.
        tiling: None: tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2].

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.

    Source of the norm: Zhang and Sennrich 2019.
    """
    scales, height, width = None, 1, weight.shape[1]
    if isinstance(weight, Float8Weight):
        weight, scales, height, width = weight.values, weight.scales, weight.height, weight.width
    check_operands(x, weight, bias, None if scales is None else FLOAT8)
    num_rows = x.shape[0]
    num_weight_rows, size = weight.shape
    if not 1 <= num_rows <= MAX_ROWS:
        raise InvalidArgumentError(f"x must be [M, K] with 1 <= M <= {MAX_ROWS}, got {list(x.shape)}")
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    like = x if dtype is None else x.new_empty(num_rows, 0, dtype=dtype)
    out = make_result(like, num_weight_rows, activation, residual)
    if tiling is None:
        tiling = tiling_for(num_rows, num_weight_rows, size, x.dtype)
    launch(
        _skinny_linear_kernel,
        (-(-num_weight_rows // tiling.columns),),
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        norm_weight_ptr=norm_weight,
        out_ptr=out,
        scale_ptr=scales,
        num_rows=num_rows,
        num_weight_rows=num_weight_rows,
        stride_x=x.stride(0),
        stride_out=out.stride(0),
        eps=eps,
        SIZE=size,
        ROWS=power_of_two(num_rows),
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        ACTIVATION=activation,
        ADD=residual is not None,
        HEIGHT=height,
        WIDTH=width,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.jit
def _fold(values, LENGTH: tl.constexpr):
    """Add up groups of LENGTH along the last dimension: [R, C, D] to [R, C, D / LENGTH]."""
    # A shape is constexpr only as long as it has no name.
    return tl.sum(
        tl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // LENGTH, LENGTH]), axis=3
    )


@triton.jit(do_not_specialize=["num_rows", "num_weight_rows"])
def _skinny_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_weight_ptr, out_ptr, scale_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_weight_rows / COLUMNS),).

    With an activation, gate and up columns alternate in a program. Each iteration loads the weights of the
    next one; the first weights are loaded before x may be read. Scales of rows are multiplied into the
    results, those of narrower tiles into the sums of VECTOR products.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    NORM: tl.constexpr = norm_weight_ptr is not None
    SCALED: tl.constexpr = scale_ptr is not None
    # Products of what one thread loads at once, 16 bytes, are added up at once: fewer sums in registers.
    # In float8 a thread loads 8 bytes at once, so that it has the same numbers of x: 16 bytes.
    VECTOR: tl.constexpr = 8 if SCALED else 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    TILED: tl.constexpr = SCALED and WIDTH < SIZE
    start_next(OVERLAP)
    num_columns = num_weight_rows // HALVES
    index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)[None, None, :]
    weight_k = tl.max_contiguous(tl.arange(0, DEPTH), VECTOR)[None, None, :] if SCALED else k
    # Rows and columns past the end repeat the last one and are not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    weight_row = tl.minimum(index // HALVES, num_columns - 1) + index % HALVES * num_columns
    x_at = x_ptr + x_row[:, None, None] * stride_x + k
    weight_at = weight_ptr + weight_row.to(tl.int64)[None, :, None] * SIZE + weight_k
    weight = tl.load(weight_at, mask=weight_k < SIZE, other=0.0)
    if TILED:
        scale_k = tl.arange(0, DEPTH // VECTOR)[None, None, :] * VECTOR
        scale_at = scale_ptr + (weight_row // HEIGHT * ((SIZE + WIDTH - 1) // WIDTH))[None, :, None]
        scale = tl.load(scale_at + scale_k // WIDTH, mask=scale_k < SIZE, other=0.0)
    wait_for_previous(OVERLAP)

    sums = tl.zeros([ROWS, COLUMNS, DEPTH // VECTOR], tl.float32)
    squares = tl.zeros([ROWS, 1, DEPTH // VECTOR], tl.float32)
    for start in range(0, SIZE, DEPTH):
        next_k = start + DEPTH + weight_k
        next_weight = tl.load(weight_at + start + DEPTH, mask=next_k < SIZE, other=0.0)
        is_inside = start + k < SIZE
        x = tl.load(x_at + start, mask=is_inside, other=0.0).to(tl.float32)
        if NORM:
            squares += _fold(x * x, VECTOR)
            x *= tl.load(norm_weight_ptr + start + k, mask=is_inside, other=0.0).to(tl.float32)
        products = _fold(weight.to(tl.float32) * x, VECTOR)
        if TILED:
            products *= scale
            next_scale_k = start + DEPTH + scale_k
            scale = tl.load(scale_at + next_scale_k // WIDTH, mask=next_scale_k < SIZE, other=0.0)
        sums += products
        weight = next_weight

    out = tl.sum(sums, axis=2)
    if NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=2) / SIZE + eps)
    if SCALED and not TILED:
        out *= tl.load(scale_ptr + weight_row // HEIGHT)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    column = index
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(out, [ROWS, COLUMNS // 2, 2]))
        out = activate(gate, ACTIVATION) * up
        column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    if ADD:
        out += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
