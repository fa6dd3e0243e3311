"""The GEMV for Hopper GPUs with packed weights: a dense one, or a single token's experts.

Imported only where Triton runs.
"""

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PackedWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS, GemvTiling
from octavo.gemm.hopper.packed import packed_expert_tiling
from octavo.gemm.hopper.packed.packed_gemv_kernel import Operands, Shape, packed_gemv_kernel
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP, SPAN, WARPS, tiling_for, unsupported_reason
from octavo.gemm.operands import check_vector
from octavo.gemm.portable.packed.packed_operands import check_packed
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps

# Words of an atom, and atoms of a span, which are its groups as well.
_ATOM = 16
_ATOMS = SPAN // GROUP


def packed_gemv_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: GemvTiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); x has 30 bits (see digits.py), sums of a group are exact.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x: [1, K] float16 or bfloat16, contiguous, columns in the weight's order.
        weight: [N, K], see packed_gemv_tiling.unsupported_reason; with an activation [gate | up] along N.
        bias, norm_weight, eps, activation, residual: see skinny.skinny_linear.
        tiling: None: tiling_for's.

    Returns:
        residual, or a new contiguous [1, N] or [1, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype or stride does not fit.
    """
    reason = unsupported_reason(weight)
    if reason is not None:
        raise InvalidArgumentError(f"packed_gemv_linear cannot run: {reason}")
    out = check_packed(x, weight, bias, activation, residual)
    if x.shape[0] != 1:
        raise InvalidArgumentError(f"x must be a single row, got {list(x.shape)}")
    num_weight_rows, size = weight.shape
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    halves = 1 if activation is None else 2
    if tiling is None:
        tiling = tiling_for(size)
    shape = Shape(
        size=size,
        padded=size,
        halves=halves,
        blocks=tiling.blocks,
        stages=tiling.stages,
        norm=norm_weight is not None,
        activation=activation,
        adds=residual is not None,
    )
    # TMA sees [atoms of a span, spans, halves, N / halves, atom], and [groups, halves, N / halves].
    words = weight.words.view(halves, num_weight_rows // halves, -1, _ATOMS, _ATOM).permute(3, 2, 0, 1, 4)
    pairs = weight.pairs.view(-1, halves, num_weight_rows // halves)
    spans = tiling.blocks * WARPS
    boxes = [_ATOMS, spans], [_ATOMS * spans]
    operands = Operands(x, norm_weight, bias)
    _launch(words, pairs, boxes, operands, out, shape, eps, weight.factor, tiling.registers)
    return out


def gemv(
    x: Tensor, weight: PackedExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as StackedExperts.gemv says: a single token, in bfloat16 or float16.

    x has 30 bits (see digits.py), sums of a group are exact.
    """
    num_chosen = choice.experts.shape[1]
    halves, summed = (1, num_chosen) if activation is None else (2, 1)
    reason = packed_expert_tiling.unsupported_reason(x[: len(choice.experts)], weight, summed)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of packed experts cannot run: {reason}")
    num_experts, num_rows, size = weight.shape
    num_columns = num_rows // halves
    tiling = packed_expert_tiling.tiling_for(size, summed)
    shape = Shape(
        size=size,
        padded=tiling.padded,
        halves=halves,
        blocks=1,
        stages=tiling.stages,
        norm=False,
        activation=activation,
        adds=adds,
        experts=num_experts,
        chosen=num_chosen,
        summed=summed,
    )
    # TMA sees [atoms of a span, spans, E halves, N / halves, atom], and [E, groups, halves, N / halves].
    words = weight.words.view(num_experts * halves, num_columns, -1, _ATOMS, _ATOM).permute(3, 2, 0, 1, 4)
    pairs = weight.pairs.view(num_experts, -1, halves, num_columns)
    boxes = [1, tiling.box], [1, _ATOMS * tiling.box]
    operands = Operands(x, ids=choice.experts, weights=choice.weights, factors=weight.factors)
    _launch(words, pairs, boxes, operands, out, shape, 0.0, 1.0, packed_expert_tiling.REGISTERS)


def _launch(
    words: Tensor,
    pairs: Tensor,
    boxes: tuple[list[int], list[int]],
    operands: Operands,
    out: Tensor,
    shape: Shape,
    eps: float,
    factor: float,
    registers: int,
) -> None:
    """Launch the kernel; `boxes` are the leading sizes of what TMA copies of words and of pairs."""
    own = TILE_ROWS // shape.halves
    launch(
        packed_gemv_kernel,
        # One program per SM, even if it has no tile: see float_gemv.
        (num_multiprocessors(operands.x.device),),
        words=describe_matrix(words, [*boxes[0], shape.halves, own, _ATOM], swizzle_bytes=4 * _ATOM),
        pairs=describe_matrix(pairs, [*boxes[1], 1, own], swizzle_bytes=4 * own),
        operands=operands,
        out=out,
        num_columns=words.shape[-2],
        eps=eps,
        factor=factor,
        shape=constants(shape),
        num_warps=WARPS,
        maxnreg=registers,
        launch_pdl=overlaps(operands.x),
    )
