"""Products of 1 to 4 tokens' experts in floats on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.gpu.device import num_multiprocessors
from octavo.gpu.launch import launch, overlaps
from octavo.layers.linear.gemv.tiling import ATOM_BYTES, TILE_ROWS, WARPS
from octavo.layers.linear.hopper.descriptor import describe_matrix
from octavo.layers.moe.float_gemv.kernel import Operands, RowShape, Shape, float_gemv_kernel
from octavo.layers.moe.float_gemv.tiling import REGISTERS, choose_float_tiling, unsupported_reason
from octavo.layers.moe.router import Choice
from octavo.layers.moe.weight import ExpertWeight


def gemv_gate_up(x: Tensor, weight: ExpertWeight, choice: Choice, activation: str) -> Tensor:
    """Return the activation of each pair's gate and up; sums are float32.

    Args:
        x: [T, K] bfloat16 or float16, contiguous.
        weight: [E, 2 n, K] = [gate | up], see tiling.unsupported_reason.
        choice: each token's k experts; of those that are E or more nothing is read.
        activation: see few.few_gate_up.

    Returns:
        A new [T k, n], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    out = x.new_empty(choice.experts.numel(), weight.shape[1] // 2)
    _launch(x, weight, choice, out, activation=activation, adds=False)
    return out


def gemv_down(x: Tensor, weight: ExpertWeight, choice: Choice, residual: Tensor | None) -> Tensor:
    """Return each token's sum of its experts' products times their weights; sums are float32.

    Args:
        x: [T k, n] of gemv_gate_up.
        weight: [E, H, n], see tiling.unsupported_reason.
        choice: see gemv_gate_up.
        residual: [T, H], rows any stride apart, to which the sums are added in place; or None.

    Returns:
        residual, or a new [T, H], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    out = x.new_empty(len(choice.experts), weight.shape[1]) if residual is None else residual
    _launch(x, weight, choice, out, activation=None, adds=residual is not None)
    return out


def _launch(
    x: Tensor, weight: ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    num_tokens, num_chosen = choice.experts.shape
    halves, summed = (1, num_chosen) if activation is None else (2, 1)
    reason = unsupported_reason(x[:num_tokens], weight, summed)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, num_rows, size = weight.shape
    values = weight.values
    tiling = choose_float_tiling(size, values.itemsize, num_tokens, summed)
    shape = Shape(
        *(size, num_experts, num_chosen, summed, num_tokens, tiling.blocks, tiling.x_steps, tiling.stages),
        *(activation, adds, weight.width if weight.scales is not None else 0),
    )
    row_shape = RowShape(summed * size, False, 0 if weight.scales is None else 1)
    atom = ATOM_BYTES // values.itemsize
    matrix = values.view(num_experts, halves, num_rows // halves, -1, atom).permute(3, 0, 1, 2, 4)
    tile = [tiling.blocks * WARPS, 1, halves, TILE_ROWS // halves, atom]
    launch(
        float_gemv_kernel,
        # One on each SM, as gemv_linear has.
        (num_multiprocessors(x.device),),
        describe_matrix(matrix, tile, swizzle_bytes=ATOM_BYTES),
        Operands(x, values if weight.scales is None else weight.scales, *choice),
        *(out, num_rows // halves, out.stride(0)),
        *(Shape(*map(gl.constexpr, shape)), RowShape(*map(gl.constexpr, row_shape))),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=overlaps(x),
    )
