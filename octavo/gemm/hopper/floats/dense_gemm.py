"""The GEMM of 2 to 256 rows for Hopper GPUs, y = epilogue(x W^T); imported only where Triton runs.

Tensor cores do the arithmetic; reading the weights and starting up take most of the time. So one warp fetches
weights by TMA as soon as the program starts, while the previous kernel still runs, and only then waits for
the rows of x, which that kernel writes:

    kernel before   ................ done
    TMA warp           w0 w1 w2 ...  | x0 x1 x2 ...
    warpgroup                        |    0  1  2 ...   epilogue

dense_gemm_kernel draws its warps, barriers and buffers. A program multiplies a tile of rows by a tile of
weights over all of K, in one order: a row's result depends on its own values and on the tiling, never on what
the other rows hold.
"""

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import Float8Weight
from octavo.gemm.hopper.floats.dense_gemm_kernel import Result, Scales, Shape, dense_gemm_kernel
from octavo.gemm.hopper.floats.dense_gemm_tiling import (
    ATOM,
    ATOM_BYTES,
    HopperTiling,
    hopper_tiling_for,
    unsupported_reason,
)
from octavo.gemm.operands import check_vector, make_result
from octavo.kernels.descriptor import describe_matrix, describe_rows
from octavo.kernels.launch import constants, launch, overlaps

_NO_SCALES = Scales(None, None, None, None)


def hopper_linear(
    x: Tensor,
    weight: Tensor | Float8Weight,
    bias: Tensor | None = None,
    *,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: HopperTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x, weight: [M, K] and [N, K], see dense_gemm_tiling.unsupported_reason; with an activation, weight is
            [gate | up] along N.
        bias, activation, residual: see skinny_linear.
        row_scales: [M] float32 contiguous, in any shape: the factor of each float8 row.
        dtype: the result's dtype; None: that of x.
        tiling: None: hopper_tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or another shape, dtype, stride or tiling does
            not fit.
    """
    reason = unsupported_reason(x, weight)
    scales = None
    if isinstance(weight, Float8Weight):
        weight, scales = weight.values, _scales(weight, row_scales)
    if reason is not None:
        raise InvalidArgumentError(f"hopper_linear cannot run: {reason}")
    if bias is not None:
        check_vector("bias", bias, weight.shape[0])
    halves = 1 if activation is None else 2
    num_rows, num_columns = x.shape[0], weight.shape[0] // halves
    # K in units of 16 bits, as tilings count: two float8 numbers are one.
    size = x.shape[1] * x.itemsize // 2
    out = make_result(
        x if dtype is None else x.new_empty(num_rows, 0, dtype=dtype), weight.shape[0], activation, residual
    )
    if tiling is None:
        tiling = hopper_tiling_for(num_rows, weight.shape[0], size, is_gated=halves == 2)
    num_tiles = -(-size // tiling.depth)
    _check_stages(tiling, num_tiles)
    atom = ATOM_BYTES // x.itemsize
    launch(
        dense_gemm_kernel,
        (-(-num_columns // tiling.columns), -(-num_rows // tiling.rows)),
        x_matrix=describe_rows(x, [tiling.rows, atom]),
        weight_matrix=describe_matrix(weight.view(halves, num_columns, -1), [halves, tiling.columns, atom]),
        result=Result(out=out, stride=out.stride(0), num_columns=num_columns, bias=bias),
        scales=scales or _NO_SCALES,
        num_rows=num_rows,
        num_tiles=num_tiles,
        shape=constants(_make_shape(tiling, activation, scales, adds=residual is not None)),
        num_warps=4,
        # The TMA warp needs few registers and leaves most of its share to the warpgroup.
        maxnreg=80 if scales is None and halves * tiling.columns <= 64 else 128,
        launch_pdl=overlaps(x),
    )
    return out


def _make_shape(tiling: HopperTiling, activation: str | None, scales: Scales | None, *, adds: bool) -> Shape:
    return Shape(
        rows=tiling.rows,
        halves=1 if activation is None else 2,
        columns=tiling.columns,
        atoms=tiling.depth // ATOM,
        weight_stages=tiling.weight_stages,
        row_stages=tiling.row_stages,
        activation=activation,
        adds=adds,
        tiled=scales is not None and scales.num_side > 1,
    )


def _check_stages(tiling: HopperTiling, num_tiles: int) -> None:
    if not min(2, num_tiles) <= tiling.row_stages <= tiling.weight_stages:
        raise InvalidArgumentError(
            f"a tiling needs 2 row_stages or more, and as many weight_stages or more, got {tiling}"
        )


def _scales(weight: Float8Weight, row_scales: Tensor | None) -> Scales:
    return Scales(row_scales, weight.scales, weight.height, weight.scales.shape[1])
