"""The skinny GEMM with a packed weight, 1 to 16 rows: y = epilogue(prologue(x) W^T); only where Triton runs.

The kernel multiplies integers as they are and scales the sum of each group in float32.
A row's result depends on its own values, the tiling and the number of rows, never on the other rows.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PLANE, PackedWeight
from octavo.gemm.operands import check_vector
from octavo.gemm.portable.packed.packed_operands import check_packed
from octavo.gemm.portable.packed.packed_result import Result
from octavo.gemm.portable.packed.packed_tiling import FEW_MAX_ROWS, FewTiling, few_tiling_for
from octavo.gemm.portable.packed.rows_kernel import Shape, few_linear_kernel
from octavo.gemm.portable.sum_parts import add_parts
from octavo.kernels.device import num_multiprocessors, nvidia_generation
from octavo.kernels.launch import launch, overlaps


def few_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: FewTiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); sums are float32.

    The previous kernel must not write weight, bias or norm_weight: this one may read them while that one
    runs.

    Args:
        x: [M, K] float16 or bfloat16, 1 <= M <= FEW_MAX_ROWS, columns in the weight's order; rows any stride
            apart.
        weight: [N, K]; with an activation [gate | up] along N.
        bias, activation, residual: see skinny.skinny_linear.
        norm_weight, eps: likewise, for a single row.
        tiling: None: few_tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit, or the tiling cuts K of a single row.
    """
    out = check_packed(x, weight, bias, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    _check_rows(num_rows, size, norm_weight)
    if tiling is None:
        tiling = few_tiling_for(num_rows, size, weight.group, nvidia_generation(x.device))
    num_spans = weight.words.shape[1] // PLANE
    turns = -(-num_spans // (tiling.num_warps * tiling.num_splits))
    splits = -(-num_spans // (tiling.num_warps * turns))
    if splits > 1 and num_rows == 1:
        raise InvalidArgumentError(f"a single row is not cut, got {tiling}")
    parts = out.unsqueeze(0)
    if splits > 1:
        parts = x.new_empty(splits, num_rows, num_weight_rows, dtype=torch.float32)
    tiles = _tiles_of_a_program(num_weight_rows, tiling, splits, x.device)
    overlap = overlaps(x)
    shape = Shape(
        bits=weight.bits,
        group=weight.group,
        size=size,
        rows=1 if num_rows == 1 else 8 if num_rows <= 8 else 16,
        columns=tiling.columns,
        warps=tiling.num_warps,
        stages=tiling.num_stages,
        turns=turns,
        in_registers=num_rows > 1 or tiling.in_registers,
        # A single row, the only one with a norm, is not split.
        norm=norm_weight is not None,
        bias=splits == 1 and bias is not None,
        activation=activation if splits == 1 else None,
        adds=splits == 1 and residual is not None,
        overlap=overlap,
    )
    launch(
        few_linear_kernel,
        (-(-num_weight_rows // (tiling.columns * tiles)), splits),
        x_ptr=x,
        words_ptr=weight.words,
        pairs_ptr=weight.pairs,
        norm_weight_ptr=x if norm_weight is None else norm_weight,
        result=Result(parts, parts.stride(1), parts.stride(0), bias, weight.factor),
        num_rows=num_rows,
        num_weight_rows=num_weight_rows,
        stride_x=x.stride(0),
        tiles=tiles,
        eps=eps,
        shape=Shape(*map(gl.constexpr, shape)),
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    if splits > 1:
        add_parts(parts, bias, out, activation, adds=residual is not None)
    return out


def _check_rows(num_rows: int, size: int, norm_weight: Tensor | None) -> None:
    """Raise InvalidArgumentError if the kernel has no form for so many rows of x."""
    if not 1 <= num_rows <= FEW_MAX_ROWS:
        raise InvalidArgumentError(f"x must be [M, K] with 1 <= M <= {FEW_MAX_ROWS}, got {[num_rows, size]}")
    if norm_weight is not None:
        if num_rows > 1:
            raise InvalidArgumentError(f"a norm needs a single row of x, got {num_rows}")
        check_vector("norm_weight", norm_weight, size)


def _tiles_of_a_program(num_weight_rows: int, tiling: FewTiling, splits: int, device: torch.device) -> int:
    """Return how many tiles each program walks over, so that all programs run at once."""
    programs = max(1, tiling.programs * num_multiprocessors(device) // splits)
    return -(-num_weight_rows // (tiling.columns * programs))
