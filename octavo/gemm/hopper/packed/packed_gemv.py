"""The GEMV for Hopper GPUs with packed weights, y = epilogue(prologue(x) W^T) of one row.

Imported only where Triton runs.
"""

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import GroupedWeight
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS, GemvTiling
from octavo.gemm.hopper.floats.float_gemv_kernel import Operands, Shape
from octavo.gemm.hopper.packed.packed_gemv_kernel import packed_gemv_kernel
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP, SPAN, WARPS, choose_tiling, unsupported_reason
from octavo.gemm.operands import check_vector
from octavo.gemm.portable.packed.packed_operands import check_product
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps

_ATOM = 16


def packed_gemv_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: GemvTiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); x has 30 bits (see digits), sums of a group are exact.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x: [1, K] float16 or bfloat16, contiguous, columns in the weight's order.
        weight: [N, K], see tiling.unsupported_reason; with an activation [gate | up] along N.
        bias, norm_weight, eps, activation, residual: see skinny.skinny_linear.
        tiling: None: choose_tiling's.

    Returns:
        residual, or a new contiguous [1, N] or [1, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype or stride does not fit.
    """
    reason = unsupported_reason(weight)
    if reason is not None:
        raise InvalidArgumentError(f"packed_gemv_linear cannot run: {reason}")
    out = check_product(x, weight, bias, activation, residual)
    if x.shape[0] != 1:
        raise InvalidArgumentError(f"x must be a single row, got {list(x.shape)}")
    num_weight_rows, size = weight.shape
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    halves = 1 if activation is None else 2
    num_columns, own = num_weight_rows // halves, TILE_ROWS // halves
    if tiling is None:
        tiling = choose_tiling(size)
    spans = tiling.blocks * WARPS
    shape = Shape(
        *(size, halves, tiling.blocks, tiling.stages, norm_weight is not None, activation),
        *(residual is not None, 0, 0),
    )
    # As [2 atoms, spans, halves, N / halves, atom], and [K / GROUP, halves, N / halves].
    words = weight.words.view(halves, num_columns, -1, SPAN // GROUP, _ATOM).permute(3, 2, 0, 1, 4)
    pairs = weight.pairs.view(-1, halves, num_columns)
    launch(
        packed_gemv_kernel,
        # One on each SM, as gemv_linear has.
        (num_multiprocessors(x.device),),
        describe_matrix(words, [2, spans, halves, own, _ATOM], swizzle_bytes=4 * _ATOM),
        describe_matrix(pairs, [2 * spans, 1, own], swizzle_bytes=4 * own),
        Operands(x, norm_weight, None, bias),
        *(out, num_columns, eps, weight.factor, constants(shape)),
        num_warps=WARPS,
        maxnreg=tiling.registers,
        launch_pdl=overlaps(x),
    )
    return out
