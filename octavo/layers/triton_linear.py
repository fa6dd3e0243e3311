"""Products of a few rows with weights, y = epilogue(prologue(x) W^T); imported only where Triton runs.

With few rows a product costs what reading the weights costs, plus a launch, so norms, activations and the
residual sum ride along:

    prologue   RMS norm of x: its weight is multiplied in while x is loaded, its 1 / rms into the results
    epilogue   + bias; gated activation of [gate | up]; or sum into the residual stream, in place

A program owns some columns of the result and reads their weights once. A row's result depends on its own
values and on the tiling, never on the other rows.
"""

# Triton's hints know neither launch options nor plain values for constexpr, nor that kernels call each other.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError, suggest
from octavo.layers.linear_tiling import MAX_ROWS, Tiling, choose_tiling
from octavo.layers.triton_activation import NAMES, activate
from octavo.layers.triton_launch import overlap_options, start_next, wait_for_previous


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); sums are float32.

    The kernel may read weight, bias and norm_weight while the kernel launched before it still runs: that one
    must not write them.

    Args:
        x: [M, K] bfloat16, float16 or float32, 1 <= M <= MAX_ROWS; rows any stride apart, last dimension
            contiguous.
        weight: [N, K] contiguous, dtype of x; with an activation [gate | up] along N.
        bias: [N] contiguous, or None.
        norm_weight: [K] contiguous, any floating dtype: x / rms(x) * norm_weight is multiplied; None: x is.
            The product x * norm_weight must fit the dtype of x, which float16 promises only for M = 1.
        eps: added to the mean square of a row of x.
        activation: "silu", "gelu" or "gelu_tanh": the result is activation(gate) * up, N / 2 columns.
        residual: [M, N] dtype of x, rows any stride apart, last dimension contiguous, not overlapping x: the
            result is added to it; not together with an activation.
        tiling: default: choose_tiling.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.

    Source of the norm: Zhang and Sennrich 2019.
    """
    _check(x, weight, bias, norm_weight)
    (num_rows, size), num_columns = x.shape, weight.shape[0]
    if activation is not None:
        num_columns = _gated_columns(num_columns, activation, residual)
    out = residual
    if out is None:
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    elif out.shape != (num_rows, num_columns) or out.dtype != x.dtype or out.stride(1) != 1:
        raise InvalidArgumentError(
            f"residual must be [M, N] = {[num_rows, num_columns]} {x.dtype} with a contiguous last "
            f"dimension, got {list(out.shape)} {out.dtype}, strides {list(out.stride())}"
        )
    if tiling is None:
        tiling = choose_tiling(num_rows, num_columns, size, is_gated=activation is not None, dtype=x.dtype)
    elif tiling.rows < num_rows:
        raise InvalidArgumentError(f"a tiling of {tiling.rows} rows cannot take {num_rows}")
    grid = (triton.cdiv(num_columns, tiling.columns),)
    tensors = (x, weight, weight if bias is None else bias, weight if norm_weight is None else norm_weight)
    options = {
        "SIZE": size,
        "COLUMNS": tiling.columns,
        "DEPTH": tiling.depth,
        "NORM": norm_weight is not None,
        "BIAS": bias is not None,
        "ACTIVATION": activation,
        "ADD": residual is not None,
        "num_warps": tiling.num_warps,
        **overlap_options(x),
    }
    if tiling.rows == 1:
        _vector_kernel[grid](*tensors, out, num_columns, eps, **options)
    else:
        tile = {"ROWS": tiling.rows, "PARTS": tiling.num_warps, "STAGES": tiling.num_stages}
        strides = (x.stride(0), out.stride(0))
        _matrix_kernel[grid](*tensors, out, num_rows, num_columns, *strides, eps, **tile, **options)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None) -> None:
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise InvalidArgumentError(
            f"x must be [M, K] with 1 <= M <= {MAX_ROWS} and a contiguous last dimension, "
            f"got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise InvalidArgumentError(
            f"weight must be [N, {x.shape[1]}] {x.dtype}, got {list(weight.shape)} {weight.dtype}"
        )
    vectors = {"bias": (bias, weight.shape[0]), "norm_weight": (norm_weight, weight.shape[1])}
    for name, (vector, size) in vectors.items():
        if vector is not None and (vector.shape != (size,) or not vector.is_contiguous()):
            raise InvalidArgumentError(f"{name} must be contiguous [{size}], got {list(vector.shape)}")
    if not weight.is_contiguous():
        raise InvalidArgumentError(f"weight must be contiguous, got strides {list(weight.stride())}")


def _gated_columns(num_columns: int, activation: str, residual: Tensor | None) -> int:
    if activation not in NAMES:
        raise InvalidArgumentError(
            f"the activation must be one of {', '.join(NAMES)}, got {activation!r}"
            f"{suggest(activation, NAMES)}"
        )
    if num_columns % 2 or residual is not None:
        raise InvalidArgumentError(
            f"an activation needs an even number of columns and no residual, got {num_columns} columns, "
            f"{'no' if residual is None else 'a'} residual"
        )
    return num_columns // 2


@triton.jit
def _load(at, k, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Load what lies inside K; no mask where all does, since it hides that addresses are aligned."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=k < SIZE, other=0.0)


@triton.jit
def _prefetch(at):
    """Ask for the lines that hold these addresses to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _write(
    first,
    second,
    bias_ptr,
    out_ptr,
    row,
    column,
    num_rows,
    num_columns,
    stride_out,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Finish and store [R, C] float32 results; second is the up half of gated ones."""
    is_column = column < num_columns
    if BIAS:
        first += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if BIAS:
            up_bias = tl.load(bias_ptr + num_columns + column, mask=is_column, other=0.0)
            second += up_bias.to(tl.float32)[None, :]
        first = activate(first, ACTIVATION) * second
    inside = (row < num_rows)[:, None] & is_column[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    if ADD:
        first += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, first.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_columns"])
def _vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    out_ptr,
    num_columns,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row, on the vector units. Grid: (ceil(columns / COLUMNS),).

    The weights of the next iteration are loaded one ahead, those of the first before x may be read.
    """
    EVEN: tl.constexpr = SIZE % DEPTH == 0
    start_next(OVERLAP)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    first_at = weight_ptr + weight_row[:, None] * SIZE + k[None, :]
    second_at = first_at + num_columns.to(tl.int64) * SIZE
    first_weight = _load(first_at, k[None, :], SIZE, EVEN)
    second_weight = first_weight
    if ACTIVATION is not None:
        second_weight = _load(second_at, k[None, :], SIZE, EVEN)
    wait_for_previous(OVERLAP)

    first = tl.zeros([COLUMNS, DEPTH], tl.float32)
    second = tl.zeros([COLUMNS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for start in tl.static_range(0, SIZE, DEPTH):
        x = _load(x_ptr + start + k, start + k, SIZE, EVEN).to(tl.float32)
        if NORM:
            squares += x * x
            x *= _load(norm_weight_ptr + start + k, start + k, SIZE, EVEN).to(tl.float32)
        first += first_weight.to(tl.float32) * x[None, :]
        if ACTIVATION is not None:
            second += second_weight.to(tl.float32) * x[None, :]
        if start + DEPTH < SIZE:
            next_k = start + DEPTH + k[None, :]
            first_weight = _load(first_at + (start + DEPTH), next_k, SIZE, EVEN)
            if ACTIVATION is not None:
                second_weight = _load(second_at + (start + DEPTH), next_k, SIZE, EVEN)

    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
    total = tl.sum(first, axis=1) * scale
    up = total
    if ACTIVATION is not None:
        up = tl.sum(second, axis=1) * scale
    _write(
        total[None, :],
        up[None, :],
        bias_ptr,
        out_ptr,
        tl.arange(0, 1),
        column,
        1,
        num_columns,
        0,
        BIAS,
        ACTIVATION,
        ADD,
    )


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _matrix_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_x,
    stride_out,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Up to ROWS rows, on the matrix units. Grid: (ceil(columns / COLUMNS),).

    A batched product: each of PARTS warps takes its own DEPTH of every iteration's K, and their sums meet at
    the end. Splitting columns among warps instead would have each of them read all of x.
    """
    EVEN: tl.constexpr = SIZE % (PARTS * DEPTH) == 0
    # One address per cache line of what all stages of the pipeline hold.
    LINE: tl.constexpr = 128 * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(STAGES * PARTS * DEPTH, LINE))
    start_next(OVERLAP)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = (tl.arange(0, PARTS) * DEPTH)[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    # Rows and columns past the end repeat the last one and are not stored.
    x_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    weight_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    x_at = x_ptr + x_row[None, :, None] * stride_x + k
    first_at = weight_ptr + weight_row[None, :, None] * SIZE + k
    second_at = first_at + num_columns.to(tl.int64) * SIZE
    if OVERLAP:
        line = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
        line_at = weight_ptr + weight_row[:, None] * SIZE + line[None, :]
        _prefetch(line_at)
        if ACTIVATION is not None:
            _prefetch(line_at + num_columns.to(tl.int64) * SIZE)
    wait_for_previous(OVERLAP)

    first = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    second = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([PARTS, ROWS], tl.float32)
    for start in tl.range(0, SIZE, PARTS * DEPTH, num_stages=STAGES):
        x = _load(x_at + start, start + k, SIZE, EVEN)
        if NORM:
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, axis=2)
            norm_weight = _load(norm_weight_ptr + start + k, start + k, SIZE, EVEN)
            x = (exact * norm_weight.to(tl.float32)).to(x.dtype)
        first_weight = _load(first_at + start, start + k, SIZE, EVEN)
        first = tl.dot(x, tl.trans(first_weight, (0, 2, 1)), first, input_precision="ieee")
        if ACTIVATION is not None:
            second_weight = _load(second_at + start, start + k, SIZE, EVEN)
            second = tl.dot(x, tl.trans(second_weight, (0, 2, 1)), second, input_precision="ieee")

    total = tl.sum(first, axis=0)
    up = total
    if ACTIVATION is not None:
        up = tl.sum(second, axis=0)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)[:, None]
        total *= scale
        up *= scale
    _write(
        total,
        up,
        bias_ptr,
        out_ptr,
        row,
        column,
        num_rows,
        num_columns,
        stride_out,
        BIAS,
        ACTIVATION,
        ADD,
    )
