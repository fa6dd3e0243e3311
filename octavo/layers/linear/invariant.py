"""Products y = x W^T + b whose rows do not depend on each other; imported only where Triton runs.

A library picks kernels by the number of rows, and sums K in another order in each of them. Here every result
is one chain of the same instructions, 16 numbers of K at a time from the first to the last, in float32:

    x [M, K] -- tiles of rows x columns, one program each, that walk K alone ---> [M, N]

Tilings differ in how many results a program owns, never in the order of K, so a row has the same bits in all
of them: one row may take small tiles, to have enough programs, and thousands of rows large ones.

Source: He et al., "Defeating Nondeterminism in LLM Inference", 2025.
"""

# Triton's hints know neither launch options nor plain values for constexpr, nor that kernels call each other.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.gpu.device import num_multiprocessors
from octavo.gpu.launch import overlap_options, start_next, wait_for_previous

# Tiles of rows that take their turns over the columns together: what they read stays in the L2 cache.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class InvariantTiling:
    """Tile of one program. At least 64 rows per 4 warps: with fewer the instruction would be another one.

    Attributes:
        rows: of the result, 64 or 128.
        columns: of the result, a power of two.
        depth: of K per iteration, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_columns: int) -> int:
        """Return how many tiles a result of that size has."""
        return -(-num_rows // self.rows) * -(-num_columns // self.columns)


# From large to small.
HALF_TILINGS = (
    InvariantTiling(128, 256, 64, 8, 3),
    InvariantTiling(128, 128, 64, 8, 4),
    InvariantTiling(64, 64, 64, 4, 4),
    InvariantTiling(64, 32, 128, 4, 4),
    InvariantTiling(64, 16, 128, 4, 5),
)
# Exact float32 products run on the vector units: there is nothing to choose for speed.
FLOAT32_TILING = InvariantTiling(64, 32, 16, 4, 2)


def choose_tiling(num_rows: int, num_columns: int, dtype: torch.dtype, min_programs: int) -> InvariantTiling:
    """Return the largest tiling of no more rows than there are that makes min_programs, else the last.

    Args:
        num_rows: M.
        num_columns: N.
        dtype: of x and weight.
        min_programs: that keep the GPU busy.
    """
    if dtype == torch.float32:
        return FLOAT32_TILING
    for tiling in HALF_TILINGS:
        num_programs = tiling.num_programs(num_rows, num_columns)
        if tiling.rows <= max(64, num_rows) and num_programs >= min_programs:
            return tiling
    return HALF_TILINGS[-1]


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tiling: InvariantTiling | None = None,
) -> Tensor:
    """Return x W^T + bias; a row's bits depend on that row, weight and bias only. Sums are float32.

    Args:
        x: [M, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [N, K] contiguous, dtype of x.
        bias: [N] contiguous, or None.
        dtype: of the result; None: that of x.
        tiling: default: choose_tiling. Does not change a bit of the result.

    Returns:
        A new contiguous [M, N].

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    _check(x, weight, bias)
    num_rows, (num_columns, size) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_columns, dtype=dtype)
    if num_rows == 0 or num_columns == 0:
        return out
    if tiling is None:
        min_programs = num_multiprocessors(x.device) * 3 // 4
        tiling = choose_tiling(num_rows, num_columns, x.dtype, min_programs)
    _linear_kernel[(tiling.num_programs(num_rows, num_columns),)](
        *(x, weight, weight if bias is None else bias, out, num_rows, num_columns, x.stride(0)),
        *(size, tiling.rows, tiling.columns, tiling.depth, tiling.num_stages, _GROUP, bias is not None),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


class InvariantLinear:
    """y = x W^T + b, each row by itself; see invariant_linear."""

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


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    x_shape, weight_shape = x.shape, weight.shape
    if len(x_shape) != 2 or x.stride(1) != 1:
        raise InvalidArgumentError(
            f"x must be [M, K] with a contiguous last dimension, "
            f"got shape {list(x_shape)}, strides {list(x.stride())}"
        )
    if len(weight_shape) != 2 or weight_shape[1] != x_shape[1] or weight.dtype != x.dtype:
        raise InvalidArgumentError(
            f"weight must be [N, {x_shape[1]}] {x.dtype}, got {list(weight_shape)} {weight.dtype}"
        )
    if not weight.is_contiguous():
        raise InvalidArgumentError(f"weight must be contiguous, got strides {list(weight.stride())}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise InvalidArgumentError(f"bias must be contiguous [{weight.shape[0]}], got {list(bias.shape)}")


@triton.jit
def _tile(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's tile (of rows, of columns): GROUP tiles of rows take the columns in turn."""
    program = tl.program_id(0)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * num_column_tiles) * GROUP
    height = tl.minimum(GROUP, tl.cdiv(num_rows, ROWS) - first)
    at = program % (GROUP * num_column_tiles)
    return first + at % height, at // height


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_x,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (tiles of rows x tiles of columns,). Beyond K both operands are 0, which changes no sum."""
    EVEN: tl.constexpr = SIZE % DEPTH == 0
    start_next(OVERLAP)
    row_tile, column_tile = _tile(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row = (row < num_rows)[:, None]
    x_at = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    # Columns past the end repeat the last one and are not stored; rows past the end are not read.
    weight_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    weight_at = weight_ptr + weight_row[:, None] * SIZE + k[None, :]
    wait_for_previous(OVERLAP)

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + start, mask=is_row, other=0.0)
            weight = tl.load(weight_at + start)
        else:
            is_k = (start + k < SIZE)[None, :]
            x = tl.load(x_at + start, mask=is_row & is_k, other=0.0)
            weight = tl.load(weight_at + start, mask=is_k, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")

    is_column = column < num_columns
    if BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row & is_column[None, :])
