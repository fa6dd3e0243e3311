"""Products of a single token's experts in MXFP4 on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.gpu.device import num_multiprocessors
from octavo.gpu.launch import launch, overlaps
from octavo.layers.linear.hopper.descriptor import describe_matrix
from octavo.layers.moe.gemv.kernel import Operands, Shape, expert_gemv_kernel
from octavo.layers.moe.gemv.tiling import (
    REGISTERS,
    WARPS,
    choose_expert_tiling,
    copy_boxes,
    unsupported_reason,
)
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.router import Choice


def gemv_gate_up(x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, activation: str) -> Tensor:
    """Return the activation of each expert's gate and up; sums are float32.

    Args:
        x: [1, K] bfloat16, contiguous.
        weight: [E, 2 n, K] = [gate | up], see tiling.unsupported_reason.
        choice: the token's k experts; of those that are E or more nothing is read.
        activation: see few.few_gate_up.

    Returns:
        A new [k, n], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    out = x.new_empty(choice.experts.shape[1], weight.shape[1] // 2)
    _launch(x, weight, choice, out, activation=activation, adds=False)
    return out


def gemv_down(x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, residual: Tensor | None) -> Tensor:
    """Return the sum of the experts' products times their weights; sums are float32.

    Args:
        x: [k, n] of gemv_gate_up.
        weight: [E, H, n], see tiling.unsupported_reason.
        choice: see gemv_gate_up.
        residual: [1, H], to which the sum is added in place; or None.

    Returns:
        residual, or a new [1, H], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    out = x.new_empty(1, weight.shape[1]) if residual is None else residual
    _launch(x, weight, choice, out, activation=None, adds=residual is not None)
    return out


def _launch(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    num_chosen = choice.experts.shape[1]
    reason = unsupported_reason(x, weight, num_chosen)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, _, size = weight.shape
    is_gated = activation is not None
    tiling = choose_expert_tiling(size, num_chosen, is_gated=is_gated)
    shape = Shape(
        *(size, num_experts, num_chosen, tiling.parts, tiling.units, tiling.stages, activation, adds)
    )
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
