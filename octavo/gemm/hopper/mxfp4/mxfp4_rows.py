"""Grouped GEMMs of experts in MXFP4 on Hopper GPUs; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.hopper.mxfp4.mxfp4_rows_kernel import Operands, Shape, expert_gemm_kernel
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import ATOM, TILE, Mxfp4ManyTiling, unsupported_reason
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch, overlaps
from octavo.kernels.rows import new_rows, readable_rows

# Two warpgroups multiply.
NUM_WARPS = 8


def expert_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    tiles: Tensor,
    tiling: Mxfp4ManyTiling,
    *,
    activation: str | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """Multiply sorted rows with the weight of their expert; sums are float32.

    Args:
        x: [P, K] bfloat16, contiguous, in the order of experts.
        weight: [E, N, K], see tiling.unsupported_reason; with an activation [gate | up] along N.
        tiles: of x, see sorted_rows.sort_rows.
        tiling: whose rows the tiles have.
        activation: of gate and up, see pair_gemv.pair_gate_up; or None.
        pairs: [P] int32, where each row's result belongs; None: where x is.

    Returns:
        A new [P, N], or [P, N / 2] with an activation, dtype of x; rows of no tile are not set.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    reason = unsupported_reason(x, weight)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMM of experts cannot run: {reason}")
    _, num_weight_rows, size = weight.shape
    words = weight.words.flatten(0, 1)
    if activation is None:
        num_columns, box = num_weight_rows, [1, TILE, 16]
    else:
        num_columns, box = num_weight_rows // 2, [1, TILE // 16, 2, 8, 16]
        words = words.unflatten(1, (2, -1, 8)).transpose(1, 2)
    out = new_rows(x, len(x), num_columns)
    shape = Shape(size, tiling.rows, tiling.stages, activation)
    launch(
        expert_gemm_kernel,
        (tiling.programs * num_multiprocessors(x.device),),
        _describe_rows(x, tiling.rows),
        describe_matrix(words, box, swizzle_bytes=64),
        Operands(weight.exponents, weight.bias, tiles, pairs),
        *(out, num_columns, Shape(*map(gl.constexpr, shape))),
        num_warps=NUM_WARPS,
        maxnreg=tiling.registers,
        launch_pdl=overlaps(x),
    )
    return out


def _describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [P, K] as [K / 64, P, 64], of which a copy has two: a span of so many rows."""
    readable = x.as_strided((readable_rows(x, rows), x.shape[1]), x.stride(), x.storage_offset())
    return describe_matrix(readable.unflatten(1, (-1, ATOM)).transpose(0, 1), [2, rows, ATOM])
