"""Checks of what the GPU's GEMMs read and write; imported only where Triton runs."""

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError, suggest
from octavo.kernels.activation import NAMES
from octavo.kernels.padded_rows import new_rows


def check_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_dtype: torch.dtype | None = None
) -> None:
    """Check x [M, K] with a contiguous last dimension, weight [N, K] and bias [N], both contiguous.

    Args:
        x: see above.
        weight: see above.
        bias: see above, or None.
        weight_dtype: what the weight must have; None: that of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    x_shape, weight_shape, weight_dtype = x.shape, weight.shape, weight_dtype or x.dtype
    if len(x_shape) != 2 or x.stride(1) != 1:
        raise InvalidArgumentError(
            "x must be [M, K] with a contiguous last dimension, "
            f"got shape {list(x_shape)}, strides {list(x.stride())}"
        )
    if len(weight_shape) != 2 or weight_shape[1] != x_shape[1] or weight.dtype != weight_dtype:
        raise InvalidArgumentError(
            f"weight must be [N, {x_shape[1]}] {weight_dtype}, got {list(weight_shape)} {weight.dtype}"
        )
    if not weight.is_contiguous():
        raise InvalidArgumentError(f"weight must be contiguous, got strides {list(weight.stride())}")
    if bias is not None:
        check_vector("bias", bias, weight_shape[0])


def check_vector(name: str, vector: Tensor, size: int) -> None:
    """Raise InvalidArgumentError if a vector is not contiguous [size]."""
    if vector.shape != (size,) or not vector.is_contiguous():
        raise InvalidArgumentError(f"{name} must be contiguous [{size}], got {list(vector.shape)}")


def make_result(x: Tensor, num_weight_rows: int, activation: str | None, residual: Tensor | None) -> Tensor:
    """Return the tensor that the GEMM of x [M, K] and a weight of N rows writes.

    Returns:
        residual, or a new contiguous [M, N], with an activation [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: the activation is unknown or comes with a residual or an odd N, or the residual
            does not fit.
    """
    num_rows, num_columns = x.shape[0], num_weight_rows
    if activation is not None:
        num_columns = _gated_columns(num_columns, activation, residual)
    if residual is None:
        return new_rows(x, num_rows, num_columns)
    if residual.shape != (num_rows, num_columns) or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise InvalidArgumentError(
            f"residual must be [M, N] = {[num_rows, num_columns]} {x.dtype} with a contiguous last "
            f"dimension, got {list(residual.shape)} {residual.dtype}, strides {list(residual.stride())}"
        )
    return residual


def _gated_columns(num_columns: int, activation: str, residual: Tensor | None) -> int:
    if activation not in NAMES:
        raise InvalidArgumentError(
            f"the activation must be one of {', '.join(NAMES)}, got {activation!r}"
            f"{suggest(activation, NAMES)}"
        )
    if num_columns % 2 or residual is not None:
        raise InvalidArgumentError(
            f"an activation needs an even number of columns and no residual, got {num_columns} columns, "
            f"{'no' if residual is None else 'a'} residual"
        )
    return num_columns // 2
