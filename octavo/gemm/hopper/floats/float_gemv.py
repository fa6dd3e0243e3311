"""The GEMV for Hopper GPUs with weights in floats: a dense one, or experts of 1 to 4 tokens.

Imported only where Triton runs.
"""

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import Float8Weight
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats import expert_gemv_tiling
from octavo.gemm.hopper.floats.dense_gemv_tiling import (
    ATOM_BYTES,
    TILE_ROWS,
    WARPS,
    GemvTiling,
    gemv_tiling_for,
    unsupported_reason,
)
from octavo.gemm.hopper.floats.float_gemv_kernel import Operands, Shape, float_gemv_kernel
from octavo.gemm.operands import check_operands, check_vector, make_result
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps


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
    """Return epilogue(prologue(x) W^T + bias) of one row; sums are float32.

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
        values, scales, height, width = weight, None, 0, 0
    check_operands(x, values, bias, values.dtype if height else None)
    if x.shape[0] != 1:
        raise InvalidArgumentError(f"x must be a single row, got {list(x.shape)}")
    num_weight_rows, size = values.shape
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    out = make_result(x, num_weight_rows, activation, residual)
    halves = 1 if activation is None else 2
    if tiling is None:
        tiling = gemv_tiling_for(size, values.itemsize)
    shape = Shape(
        size=size,
        halves=halves,
        blocks=tiling.blocks,
        stages=tiling.stages,
        norm=norm_weight is not None,
        activation=activation,
        adds=residual is not None,
        height=height,
        width=width,
    )
    # TMA sees it as [K in atoms, halves, N / halves, atom].
    matrix = values.view(halves, num_weight_rows // halves, -1, _atom(values)).permute(2, 0, 1, 3)
    _launch(matrix, [], Operands(x, norm_weight, scales, bias), out, shape, eps, tiling.registers)
    return out


def gemv(
    x: Tensor, weight: ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as StackedExperts.gemv says: 1 to 4 tokens, in bfloat16 or float16; sums are float32."""
    num_tokens, num_chosen = choice.experts.shape
    halves, summed = (1, num_chosen) if activation is None else (2, 1)
    reason = expert_gemv_tiling.unsupported_reason(x[:num_tokens], weight, summed)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, num_rows, size = weight.shape
    values = weight.values
    tiling = expert_gemv_tiling.float_tiling_for(size, values.itemsize, num_tokens, summed)
    shape = Shape(
        size=size,
        halves=halves,
        blocks=tiling.blocks,
        stages=tiling.stages,
        norm=False,
        activation=activation,
        adds=adds,
        height=0 if weight.scales is None else 1,
        width=weight.width,
        experts=num_experts,
        chosen=num_chosen,
        summed=summed,
        tokens=num_tokens,
    )
    # TMA sees them as [K in atoms, E, halves, N / halves, atom].
    matrix = values.view(num_experts, halves, num_rows // halves, -1, _atom(values)).permute(3, 0, 1, 2, 4)
    operands = Operands(x, scales=weight.scales, ids=choice.experts, factors=choice.weights)
    _launch(matrix, [1], operands, out, shape, 0.0, expert_gemv_tiling.REGISTERS)


def _atom(values: Tensor) -> int:
    """Return how many numbers an atom has."""
    return ATOM_BYTES // values.itemsize


def _launch(
    matrix: Tensor, box: list[int], operands: Operands, out: Tensor, shape: Shape, eps: float, registers: int
) -> None:
    """Launch the kernel; `box` is how many experts a copy has, if the matrix has experts."""
    tile = [shape.blocks * WARPS, *box, shape.halves, TILE_ROWS // shape.halves, matrix.shape[-1]]
    launch(
        float_gemv_kernel,
        # One program per SM, even if it has no tile: otherwise two programs of the next kernel would land on
        # the empty SMs.
        (num_multiprocessors(operands.x.device),),
        matrix=describe_matrix(matrix, tile, swizzle_bytes=ATOM_BYTES),
        operands=operands,
        out=out,
        num_columns=matrix.shape[-2],
        stride_out=out.stride(0),
        eps=eps,
        shape=constants(shape),
        num_warps=WARPS,
        maxnreg=registers,
        launch_pdl=overlaps(operands.x),
    )
