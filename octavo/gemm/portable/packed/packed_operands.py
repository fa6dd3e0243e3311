"""Checks of what GEMMs with packed weights read and write; imported only where Triton runs."""

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PackedWeight
from octavo.gemm.operands import check_vector, make_result


def check_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """Return the tensor that a GEMM writes; see linear.operands.make_result.

    Args:
        x: [M, K] float16 or bfloat16, last dimension contiguous.
        weight: [N, K].
        bias: [N] contiguous, or None.
        activation: of the result, or None.
        residual: [M, N], or None.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    if x.dim() != 2 or x.shape[1] != weight.size or x.stride(1) != 1:
        raise InvalidArgumentError(
            f"x must be [M, {weight.size}] with a contiguous last dimension, got shape {list(x.shape)}, "
            f"strides {list(x.stride())}"
        )
    if x.element_size() != 2:
        raise InvalidArgumentError(f"x must be float16 or bfloat16, got {x.dtype}")
    num_weight_rows = weight.shape[0]
    if bias is not None:
        check_vector("bias", bias, num_weight_rows)
    return make_result(x, num_weight_rows, activation, residual)
