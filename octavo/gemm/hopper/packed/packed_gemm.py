"""The GEMM of 17 to 256 rows with a weight of 4 bits on Hopper GPUs, y = epilogue(x W^T).

packed_gemm_kernel draws its warps, barriers and buffers. A row's result depends on its own values, the tiling
and the number of rows, never on the other rows. Imported only where Triton runs.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import MOST_GROUPS, PLANE, TILE, PackedWeight
from octavo.gemm.hopper.packed.packed_gemm_kernel import Shape, packed_gemm_kernel
from octavo.gemm.hopper.packed.packed_gemm_tiling import (
    ATOM,
    SPAN,
    HopperMediumTiling,
    hopper_medium_tiling_for,
    unsupported_reason,
)
from octavo.gemm.hopper.packed.split_k import Parts
from octavo.gemm.portable.packed.packed_operands import check_packed
from octavo.gemm.portable.packed.packed_result import Result
from octavo.kernels.descriptor import describe_matrix, describe_rows
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps

# Two warpgroups multiply; the TMA warp counts as a third one.
NUM_WARPS = 8


def hopper_medium_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: HopperMediumTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32, weights are rounded to the dtype of x.

    In bfloat16 scales and minimums are rounded as well: results have 1.25 times the error of plain torch with
    the same weights in bfloat16. The previous kernel must not write weight or bias: this one may read them
    while that one runs. Two products with one weight must not run at the same time, on two streams: both
    would count with its counters.

    Args:
        x: [M, K] float16 or bfloat16, M at most 256, columns in the weight's order; see unsupported_reason.
        weight: [N, K] of 4 bits; with an activation [gate | up] along N.
        bias, activation, residual: see skinny.skinny_linear.
        tiling: None: hopper_medium_tiling_for's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype, stride or tiling does not fit.
    """
    out = check_packed(x, weight, bias, activation, residual)
    reason = unsupported_reason(x, weight, is_gated=activation is not None)
    if reason is not None:
        raise InvalidArgumentError(f"hopper_medium_linear cannot run: {reason}")
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if tiling is None:
        tiling = hopper_medium_tiling_for(
            num_rows, num_weight_rows, size, weight.group, num_multiprocessors(x.device)
        )
    num_groups = -(-num_rows // (tiling.rows * tiling.blocks))
    if num_groups > MOST_GROUPS:
        raise InvalidArgumentError(f"a tiling needs blocks for half of {num_rows} rows, got {tiling}")
    num_spans = weight.words.shape[1] // PLANE
    num_units = -(-num_weight_rows // TILE) * num_groups * num_spans
    programs = min(tiling.programs, num_units)
    parts = x.new_empty(programs, tiling.blocks * TILE * tiling.rows, dtype=torch.float32)
    is_gated = activation is not None
    launch(
        packed_gemm_kernel,
        (programs,),
        x_matrix=describe_rows(x, [tiling.rows, ATOM], tiling.blocks),
        words_matrix=_words(weight.words, is_gated=is_gated),
        pairs_matrix=_pairs(weight, is_gated=is_gated),
        result=Result(out=out, stride=out.stride(0), stride_part=0, bias=bias, factor=weight.factor),
        parts=Parts(sums=parts, arrivals=weight.arrivals),
        num_rows=num_rows,
        num_columns=out.shape[1],
        num_spans=num_spans,
        num_units=num_units,
        num_groups=num_groups,
        shape=constants(_make_shape(weight.group, tiling, activation, adds=residual is not None)),
        num_warps=NUM_WARPS,
        maxnreg=tiling.max_registers,
        launch_pdl=overlaps(x),
    )
    return out


def _make_shape(group: int, tiling: HopperMediumTiling, activation: str | None, *, adds: bool) -> Shape:
    return Shape(
        group=group,
        rows=tiling.rows,
        blocks=tiling.blocks,
        atoms=tiling.atoms,
        row_stages=tiling.row_stages,
        word_stages=tiling.word_stages,
        activation=activation,
        adds=adds,
    )


def _words(words: Tensor, *, is_gated: bool) -> TensorDescriptor:
    """Describe words to TMA as tiles of rows; gate and up alternate, eight rows of each."""
    if not is_gated:
        return describe_matrix(words, [TILE, PLANE])
    by_turns = words.view(2, words.shape[0] // 16, 8, words.shape[1]).transpose(0, 1)
    return describe_matrix(by_turns, [TILE // 16, 2, 8, PLANE])


def _pairs(weight: PackedWeight, *, is_gated: bool) -> TensorDescriptor:
    """Describe scales and minimums in the same order."""
    groups = SPAN // weight.group
    if not is_gated:
        return describe_matrix(weight.pairs, [groups, TILE], swizzle_bytes=0)
    num_groups, num_rows = weight.pairs.shape
    by_turns = weight.pairs.view(num_groups, 2, num_rows // 16, 8).transpose(1, 2)
    return describe_matrix(by_turns, [groups, TILE // 16, 2, 8], swizzle_bytes=0)
