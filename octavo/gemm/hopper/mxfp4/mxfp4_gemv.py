"""Products of a single token's experts in MXFP4 on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_kernel import Operands, Shape, expert_gemv_kernel
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import (
    REGISTERS,
    WARPS,
    copy_boxes,
    mxfp4_gemv_tiling_for,
    unsupported_reason,
)
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlaps


def gemv(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as stacked.Gemv says: a single token, in bfloat16; sums are float32."""
    num_chosen = choice.experts.shape[1]
    reason = unsupported_reason(x, weight, num_chosen)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, _, size = weight.shape
    is_gated = activation is not None
    tiling = mxfp4_gemv_tiling_for(size, num_chosen, is_gated=is_gated)
    shape = Shape(size, num_experts, num_chosen, tiling.parts, tiling.units, tiling.stages, activation, adds)
    words, exponents = weight.words, weight.exponents
    boxes = copy_boxes(is_gated=is_gated)
    if is_gated:
        words = words.unflatten(2, (2, -1)).permute(2, 0, 1, 3, 4)
        exponents = exponents.unflatten(2, (2, -1)).permute(2, 0, 1, 3)
    launch(
        expert_gemv_kernel,
        # One on each SM, as gemv_linear has.
        (num_multiprocessors(x.device),),
        describe_matrix(words, boxes[0], swizzle_bytes=64),
        describe_matrix(exponents, boxes[1], swizzle_bytes=4 * boxes[1][-1]),
        Operands(x, weight.bias, *choice),
        *(out, words.shape[-2], Shape(*map(gl.constexpr, shape))),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=overlaps(x),
    )
