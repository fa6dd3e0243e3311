"""The GEMM of many float8 rows on Hopper GPUs, y = epilogue(x W^T); imported only where Triton runs.

persistent_kernel draws its warps, barriers and buffers.
"""

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import Float8Weight
from octavo.gemm.float8_operands import check_float8
from octavo.gemm.hopper.float8.many_tiling import (
    HALF_ROWS,
    STEP,
    ManyTiling,
    tiling_for,
    unsupported_reason,
)
from octavo.gemm.hopper.float8.persistent_epilogue import Result, Shape
from octavo.gemm.hopper.float8.persistent_kernel import persistent_float8_kernel
from octavo.kernels.descriptor import describe_matrix, describe_rows
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps

# Registers per thread, before the TMA warp gives most of its share to the warpgroups.
_REGISTERS = 168


def many_linear(
    x: Tensor,
    weight: Float8Weight,
    bias: Tensor | None = None,
    *,
    row_scales: Tensor,
    dtype: torch.dtype,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: ManyTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); tensor cores sum 512 products at a time, all else is float32.

    The previous kernel must not write weight, scales or bias.

    Args:
        x: [M, K] float8; rows a multiple of 16 bytes apart, last dimension contiguous.
        weight: [N, K], see many_tiling.unsupported_reason; with an activation [gate | up] along N.
        bias, activation, residual: see skinny_linear; the residual's rows as those of x.
        row_scales: [M] float32 contiguous, in any shape: the factor of each row of x.
        dtype: of the result.
        tiling: None: tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2].

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype or stride does not fit.
    """
    reason = unsupported_reason(weight)
    if reason is not None:
        raise InvalidArgumentError(f"many_linear cannot run: {reason}")
    out = check_float8(x, weight, bias, row_scales, dtype, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if num_rows == 0:
        return out
    _check_alignment("x", x)
    _check_alignment("the residual", out)
    halves = 1 if activation is None else 2
    is_tiled = weight.height > 1
    if tiling is None:
        adds = residual is not None or bias is not None
        tiling = tiling_for(
            num_rows, num_weight_rows, num_multiprocessors(x.device), halves, adds=adds, is_tiled=is_tiled
        )
    num_columns = num_weight_rows // halves
    values = weight.values.view(halves, num_columns, size)
    # With one part, the kernel does not read the extra descriptors.
    extra = tiling.extra or tiling.columns
    launch(
        persistent_float8_kernel,
        (num_multiprocessors(x.device),),
        x_matrix=describe_rows(x, [HALF_ROWS, STEP]),
        weight_matrix=describe_matrix(values, [halves, tiling.columns, STEP]),
        extra_matrix=describe_matrix(values, [halves, extra, STEP]),
        out_matrix=_describe_result(out, tiling.columns),
        out_extra=_describe_result(out, extra),
        result=Result(out=out, stride=out.stride(0), row_scales=row_scales, scales=weight.scales, bias=bias),
        num_rows=num_rows,
        num_columns=num_columns,
        num_spans=-(-size // (STEP * tiling.span)),
        shape=constants(_make_shape(tiling, activation, is_tiled=is_tiled, adds=residual is not None)),
        num_warps=4,
        maxnreg=_REGISTERS,
        launch_pdl=overlaps(x),
    )
    return out


def _check_alignment(name: str, rows: Tensor) -> None:
    if rows.stride(0) * rows.itemsize % 16 or rows.data_ptr() % 16:
        raise InvalidArgumentError(f"rows of {name} must begin at 16 bytes, got {rows.stride(0)} apart")


def _make_shape(tiling: ManyTiling, activation: str | None, *, is_tiled: bool, adds: bool) -> Shape:
    return Shape(
        halves=1 if activation is None else 2,
        columns=tiling.columns,
        extra=tiling.extra,
        stages=tiling.stages,
        span=tiling.span,
        tiled=is_tiled,
        group=tiling.group,
        activation=activation,
        adds=adds,
    )


def _describe_result(out: Tensor, columns: int) -> object:
    return describe_matrix(out, [HALF_ROWS, columns], swizzle_bytes=min(128, out.itemsize * columns))
