"""The row-invariant GEMM, y = x W^T + b: no row depends on the others; imported only where Triton runs.

A library chooses kernels by the number of rows, and each sums K in a different order. Here every result is
summed by the same instructions in the same order, 16 numbers of K at a time, in float32:

    x [M, K] -- tiles of rows x columns, one program each, without splitting K ---> [M, N]

Tilings differ in how many results a program computes, never in the order of K, so a row has the same bits in
all of them.

Source: He et al., "Defeating Nondeterminism in LLM Inference", 2025.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.gemm.linear import UnfusedLinear
from octavo.gemm.operands import check_operands
from octavo.gemm.portable.invariant_tiling import InvariantTiling, tiling_for
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

# Tiles of rows that walk the columns together, so that what they read stays in the L2 cache.
_GROUP = 8


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tiling: InvariantTiling | None = None,
    parts: int = 1,
) -> Tensor:
    """Return x W^T + bias; a row's bits depend on that row, weight and bias only. Sums are float32.

    Args:
        x: [M, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [N, K] contiguous, dtype of x.
        bias: [N] contiguous, or None.
        dtype: of the result; None: that of x.
        tiling: None: tiling_for's. Changes no bit of the result.
        parts: of each step's K, multiplied side by side, since a product waits for the one before it with
            the same sum; a power of two. Changes bits.

    Returns:
        A new contiguous [M, N].

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    check_operands(x, weight, bias)
    num_rows, (num_columns, size) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_columns, dtype=dtype)
    if num_rows == 0 or num_columns == 0:
        return out
    if tiling is None:
        min_programs = num_multiprocessors(x.device) * 3 // 4
        tiling = tiling_for(num_rows, num_columns, x.dtype, min_programs)
    launch(
        _linear_kernel,
        (tiling.num_programs(num_rows, num_columns),),
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        num_rows=num_rows,
        num_columns=num_columns,
        stride_x=x.stride(0),
        SIZE=size,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        PARTS=parts,
        STAGES=tiling.num_stages,
        GROUP=_GROUP,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


class InvariantLinear(UnfusedLinear):
    """y = x W^T + b, in which no row depends on the others; see invariant_linear."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        """Keep weight [N, K] (a contiguous copy if it is not), bias [N] and the dtype of results."""
        self.weight = weight.contiguous()
        self.bias = bias
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return invariant_linear(x, self.weight, self.bias, dtype=self._dtype)


@triton.jit
def _tile(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's tile (of rows, of columns): GROUP tiles of rows take the columns in turn."""
    program = tl.program_id(0)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * num_column_tiles) * GROUP
    height = tl.minimum(GROUP, tl.cdiv(num_rows, ROWS) - first)
    at = program % (GROUP * num_column_tiles)
    return first + at % height, at // height


@triton.jit
def _parts_of(LENGTH: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr):
    """Return rows and columns of K of a step's operand [PARTS * LENGTH, DEPTH / PARTS]: parts one by one."""
    index = tl.arange(0, PARTS * LENGTH)
    k = tl.arange(0, DEPTH // PARTS)[None, :]
    if PARTS == 1:
        return index, k
    else:
        return index % LENGTH, (index // LENGTH * (DEPTH // PARTS))[:, None] + k


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_columns, stride_x,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows x tiles of columns,). Beyond K both operands are 0, which changes no sum."""
    EVEN: tl.constexpr = SIZE % DEPTH == 0
    start_next(OVERLAP)
    row_tile, column_tile = _tile(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    x_index, x_k = _parts_of(ROWS, DEPTH, PARTS)
    weight_index, weight_k = _parts_of(COLUMNS, DEPTH, PARTS)
    x_row = row_tile * ROWS + x_index
    is_row = (x_row < num_rows)[:, None]
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * stride_x + x_k
    # Columns past the end repeat the last one and are not stored; rows past the end are not read.
    weight_row = tl.minimum(column_tile * COLUMNS + weight_index, num_columns - 1).to(tl.int64)
    weight_at = weight_ptr + weight_row[:, None] * SIZE + weight_k
    wait_for_previous(OVERLAP)

    total = tl.zeros([ROWS, COLUMNS] if PARTS == 1 else [PARTS, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + start, mask=is_row, other=0.0)
            weight = tl.load(weight_at + start)
        else:
            x = tl.load(x_at + start, mask=is_row & (start + x_k < SIZE), other=0.0)
            weight = tl.load(weight_at + start, mask=start + weight_k < SIZE, other=0.0)
        if PARTS == 1:
            weight = tl.trans(weight)
        else:
            x = tl.reshape(x, [PARTS, ROWS, DEPTH // PARTS])
            weight = tl.permute(tl.reshape(weight, [PARTS, COLUMNS, DEPTH // PARTS]), (0, 2, 1))
        total = tl.dot(x, weight, total, input_precision="ieee")
    if PARTS > 1:
        total = tl.sum(total, axis=0)

    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inside = (row < num_rows)[:, None] & is_column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)
