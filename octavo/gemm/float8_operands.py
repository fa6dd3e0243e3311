"""Checks of what the GEMMs of float8 rows read and write; imported only where Triton runs."""

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.operands import check_operands, make_result


def check_float8(
    x: Tensor,
    weight: Float8Weight,
    bias: Tensor | None,
    row_scales: Tensor,
    dtype: torch.dtype,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """Return the tensor that the product of float8 rows x [M, K] and a weight writes; see make_result.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    check_operands(x, weight.values, bias, FLOAT8)
    if x.dtype != FLOAT8 or row_scales.numel() != x.shape[0]:
        raise InvalidArgumentError(f"x must be float8 with a scale for each row, got {x.dtype}")
    return make_result(x.new_empty(x.shape[0], 0, dtype=dtype), weight.shape[0], activation, residual)
