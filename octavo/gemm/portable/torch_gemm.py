"""torch's own products, cuBLAS on a GPU, in the form of the others; see gemm.gpu_linear."""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from torch.nn.functional import linear as torch_linear

from octavo.forms.float8 import Float8Weight
from octavo.forms.packed import PackedWeight
from octavo.gemm.gated import activate_and_multiply
from octavo.gemm.portable.packed.dequantise import dequantise


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias."""
    return torch_linear(x, weight, bias)


def dequantised_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Dequantise a weight [N, K], and return x W^T + bias: activated, or added to residual in place."""
    out = torch_linear(x, dequantise(weight, x), bias)
    return _finish(out, activation, residual)


def float8_linear(
    x: Tensor,
    weight: Float8Weight,
    bias: Tensor | None,
    *,
    row_scales: Tensor,
    dtype: torch.dtype,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias of float8 rows: activated, or added to residual in place.

    Args:
        x: [M, K] float8.
        weight: [N, K], see float8_tiling.torch_fits_rows and torch_fits_tiles.
        bias: [N] or None.
        row_scales: of x, [M, 1], or [M, K / 128] for a weight of tiles.
        dtype: of the result.
        activation: name of a gated activation, or None.
        residual: [M, N] or None.
    """
    of_rows, of_weight = ScalingType.RowWise, ScalingType.RowWise
    if weight.width < weight.shape[1]:
        of_rows, of_weight = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    operands = (x, weight.values.t(), row_scales, of_rows, weight.scales.t(), of_weight)
    out = scaled_mm(*operands, output_dtype=torch.bfloat16).to(dtype)
    out = out if bias is None else out.add_(bias)
    return _finish(out, activation, residual)


def _finish(out: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        return residual.add_(out)
    return out if activation is None else activate_and_multiply(out, activation)
