"""Products of 1 to 4 tokens' experts in floats on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS
from octavo.gemm.hopper.floats.expert_gemv_kernel import Operands, RowShape, Shape, float_gemv_kernel
from octavo.gemm.hopper.floats.expert_gemv_tiling import REGISTERS, float_tiling_for, unsupported_reason
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlaps


def gemv(
    x: Tensor, weight: ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as stacked.Gemv says: 1 to 4 tokens, in bfloat16 or float16; sums are float32."""
    num_tokens, num_chosen = choice.experts.shape
    halves, summed = (1, num_chosen) if activation is None else (2, 1)
    reason = unsupported_reason(x[:num_tokens], weight, summed)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, num_rows, size = weight.shape
    values = weight.values
    tiling = float_tiling_for(size, values.itemsize, num_tokens, summed)
    shape = Shape(
        size,
        num_experts,
        num_chosen,
        summed,
        num_tokens,
        tiling.blocks,
        tiling.x_steps,
        tiling.stages,
        activation,
        adds,
        weight.width if weight.scales is not None else 0,
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
