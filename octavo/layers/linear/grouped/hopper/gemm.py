"""The GEMM of 17 to 256 rows with a weight of 4 bits on Hopper GPUs, y = epilogue(x W^T).

See kernel. A row's result depends on its own values, the tiling and the number of rows, never on the other
rows. Imported only where Triton runs.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.errors import InvalidArgumentError
from octavo.gpu.device import num_multiprocessors
from octavo.gpu.launch import launch, overlaps
from octavo.layers.linear.grouped.hopper.kernel import Shape, hopper_medium_kernel
from octavo.layers.linear.grouped.hopper.tiling import (
    ATOM,
    TILE,
    HopperMediumTiling,
    choose_hopper_medium_tiling,
    unsupported_reason,
)
from octavo.layers.linear.grouped.medium import add_parts
from octavo.layers.linear.grouped.operands import check_product
from octavo.layers.linear.grouped.result import Result
from octavo.layers.linear.grouped.weight import PLANE, GroupedWeight
from octavo.layers.linear.hopper.descriptor import describe_matrix, describe_rows

# Two warpgroups multiply. The TMA warp counts as a third one, and three share an SM's registers.
NUM_WARPS = 8
MAX_REGISTERS = 168


def hopper_medium_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: HopperMediumTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32, weights are rounded to the dtype of x.

    In bfloat16 scales and minimums are rounded as well: results have 1.25 times the error of plain torch with
    the same weights in bfloat16. The previous kernel must not write weight or bias: this one may read them
    while that one runs.

    Args:
        x: [M, K] float16 or bfloat16, columns in the weight's order; see unsupported_reason.
        weight: [N, K] of 4 bits; with an activation [gate | up] along N.
        bias, activation, residual: see skinny.skinny_linear.
        tiling: None: choose_hopper_medium_tiling's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or a shape, dtype, stride or tiling does not fit.
    """
    out = check_product(x, weight, bias, activation, residual)
    reason = unsupported_reason(x, weight, is_gated=activation is not None)
    if reason is not None:
        raise InvalidArgumentError(f"hopper_medium_linear cannot run: {reason}")
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if tiling is None:
        tiling = choose_hopper_medium_tiling(num_rows, num_weight_rows, size, num_multiprocessors(x.device))
    if tiling.row_stages % 2 or tiling.word_stages < max(2, tiling.row_stages // 2):
        raise InvalidArgumentError(
            "a tiling needs an even number of row_stages, and half as many word_stages, at least 2; "
            f"got {tiling}"
        )
    num_spans = weight.words.shape[1] // PLANE
    each = -(-num_spans // tiling.num_splits)
    splits = -(-num_spans // each)
    if splits == 1:
        _multiply(x, weight, bias, out.unsqueeze(0), tiling, each, activation, adds=residual is not None)
        return out
    parts = x.new_empty(splits, num_rows, num_weight_rows, dtype=torch.float32)
    _multiply(x, weight, None, parts, tiling, each, None, adds=False)
    return add_parts(parts, bias, out, activation, adds=residual is not None)


def _multiply(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    parts: Tensor,
    tiling: HopperMediumTiling,
    each: int,
    activation: str | None,
    *,
    adds: bool,
) -> None:
    """Write parts [splits, M, columns of the result], each of `each` spans of K."""
    num_rows, num_columns = parts.shape[1:]
    height = TILE * tiling.tiles // (1 if activation is None else 2)
    shape = Shape(
        *(weight.group, tiling.rows, tiling.tiles, tiling.row_stages, tiling.word_stages, activation, adds)
    )
    launch(
        hopper_medium_kernel,
        (-(-num_rows // tiling.rows), -(-num_columns // height), parts.shape[0]),
        describe_rows(x, [tiling.rows, ATOM]),
        _words(weight.words, is_gated=activation is not None),
        weight.pairs,
        Result(parts, parts.stride(1), parts.stride(0), bias, weight.factor),
        *(num_rows, num_columns, weight.words.shape[1] // PLANE, each),
        Shape(*map(gl.constexpr, shape)),
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        launch_pdl=overlaps(x),
    )


def _words(words: Tensor, *, is_gated: bool) -> TensorDescriptor:
    """Describe words to TMA: tiles of rows; of gate and up, eight rows of each by turns."""
    if not is_gated:
        return describe_matrix(words, [TILE, PLANE])
    by_turns = words.view(2, words.shape[0] // 16, 8, words.shape[1]).transpose(0, 1)
    return describe_matrix(by_turns, [TILE // 16, 2, 8, PLANE])
