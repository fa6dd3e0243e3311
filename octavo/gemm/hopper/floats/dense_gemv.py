"""The GEMV for Hopper GPUs, y = epilogue(prologue(x) W^T) of one row; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import Float8Weight
from octavo.gemm.hopper.floats.dense_gemv_kernel import Operands, Shape, gemv_kernel
from octavo.gemm.hopper.floats.dense_gemv_tiling import (
    ATOM_BYTES,
    TILE_ROWS,
    WARPS,
    GemvTiling,
    gemv_tiling_for,
    unsupported_reason,
)
from octavo.gemm.operands import check_operands, check_vector, make_result
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlaps


def gemv_linear(
    x: Tensor,
    weight: Tensor | Float8Weight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: GemvTiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); sums are float32.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x: [1, K] float16 or bfloat16, contiguous.
        weight: [N, K], see dense_gemv_tiling.unsupported_reason; with an activation [gate | up] along N.
        bias, norm_weight, eps, activation, residual: see skinny.skinny_linear. A normed row is rounded to the
            dtype of x, or for float8 weights to float16.
        tiling: None: gemv_tiling_for's.

    Returns:
        residual, or a new contiguous [1, N] or [1, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype or stride does not fit.
    """
    reason = unsupported_reason(weight)
    if reason is not None:
        raise InvalidArgumentError(f"gemv_linear cannot run: {reason}")
    if isinstance(weight, Float8Weight):
        values, scales, height, width = weight.values, weight.scales, weight.height, weight.width
    else:
        values, scales, height, width = weight, weight, 0, 0
    check_operands(x, values, bias, values.dtype if height else None)
    if x.shape[0] != 1:
        raise InvalidArgumentError(f"x must be a single row, got {list(x.shape)}")
    num_weight_rows, size = values.shape
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    out = make_result(x, num_weight_rows, activation, residual)
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    if tiling is None:
        tiling = gemv_tiling_for(size, values.itemsize)
    shape = Shape(
        size,
        halves,
        tiling.blocks,
        tiling.stages,
        norm_weight is not None,
        activation,
        residual is not None,
        height,
        width,
    )
    atom = ATOM_BYTES // values.itemsize
    # As [K in atoms, halves, N / halves, atom].
    matrix = values.view(halves, num_columns, size // atom, atom).permute(2, 0, 1, 3)
    tile = [tiling.blocks * WARPS, halves, TILE_ROWS // halves, atom]
    launch(
        gemv_kernel,
        # One on each SM, even without a tile: the next kernel's would go two by two where there is none.
        (num_multiprocessors(x.device),),
        describe_matrix(matrix, tile, swizzle_bytes=ATOM_BYTES),
        Operands(x, x if norm_weight is None else norm_weight, scales, bias),
        *(out, num_columns, eps, Shape(*map(gl.constexpr, shape))),
        num_warps=WARPS,
        maxnreg=tiling.registers,
        launch_pdl=overlaps(x),
    )
    return out
