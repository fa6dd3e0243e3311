"""Products of a single token's packed experts on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.packed.packed_expert_kernel import Operands, Shape, packed_expert_kernel
from octavo.gemm.hopper.packed.packed_expert_tiling import REGISTERS, tiling_for, unsupported_reason
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP, SPAN, WARPS
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlaps

_ATOM = 16
_ATOMS = SPAN // GROUP


def gemv(
    x: Tensor, weight: PackedExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as stacked.Gemv says: a single token, in bfloat16 or float16; sums of a group are exact.

    x has 30 bits; see linear.grouped.gemv.digits.
    """
    num_chosen = choice.experts.shape[1]
    halves, summed = (1, num_chosen) if activation is None else (2, 1)
    reason = unsupported_reason(x[: len(choice.experts)], weight, summed)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of packed experts cannot run: {reason}")
    num_experts, num_rows, size = weight.shape
    num_columns, own = num_rows // halves, TILE_ROWS // halves
    tiling = tiling_for(size, summed)
    shape = Shape(
        summed * tiling.padded,
        size,
        tiling.padded,
        tiling.columns,
        num_experts,
        num_chosen,
        summed,
        halves,
        1,
        tiling.stages,
        False,
        activation,
        adds,
    )
    # As [atoms of a span, spans, E halves, rows of a half, atom], and [E, groups, halves, rows of a half].
    words = weight.words.view(num_experts * halves, num_columns, -1, _ATOMS, _ATOM).permute(3, 2, 0, 1, 4)
    pairs = weight.pairs.view(num_experts, -1, halves, num_columns)
    launch(
        packed_expert_kernel,
        # One on each SM, as gemv_linear has.
        (num_multiprocessors(x.device),),
        describe_matrix(words, [1, tiling.box, halves, own, _ATOM], swizzle_bytes=4 * _ATOM),
        describe_matrix(pairs, [1, _ATOMS * tiling.box, 1, own], swizzle_bytes=4 * own),
        Operands(x, *choice, weight.factors),
        *(out, num_columns, Shape(*map(gl.constexpr, shape))),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=overlaps(x),
    )
