"""Linear layers with a float8 weight on an NVIDIA GPU.

    path      rows of x    activations    what the GEMM fuses
    gemv      1            as they are    norm, activation and residual sum, on Hopper GPUs
    skinny    1            as they are    the same
    float8    some         float8         activation and residual sum
    hopper    some         float8         the same, on Hopper GPUs
    many      many         float8         the same, on Hopper GPUs
    torch     many         float8         nothing

tiling.choose_path decides. Rows of x become float8 with a scale each, in the kernel that norms them;
for torch's product with a weight of 128 x 128 tiles, with a scale for each 128 numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo.forms.base import join_rows
from octavo.forms.float8 import Float8Weight
from octavo.gemm.dequantised import DequantisedLinear
from octavo.gemm.fused import Norm, activated, product_of
from octavo.gemm.portable.float8_tiling import Float8Path, choose_path, has_tiles, unsupported_reason

__all__ = ["DESCRIPTION", "Float8GpuLinear", "choose_path", "make_layer", "unsupported_reason"]

DESCRIPTION = (
    "activations in float8, but those of single rows, by GPU kernels; dequantised in each GEMM where tiles "
    "are narrower than 32 columns or no power of two"
)


class Float8GpuLinear:
    """A FusedLinear, y = x W^T + b, with a float8 weight."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None) -> None:
        """Keep weight [N, K], which has_tiles, and bias [N]."""
        self.weight = weight
        self.bias = bias

    @property
    def form(self) -> tuple[int, int]:
        """Sizes of a tile, for which kernels are compiled."""
        return self.weight.height, self.weight.width

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return self._product(x, None, None)

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """See FusedLinear."""
        path = choose_path(hidden.shape[0], self.weight)
        if path in ("gemv", "skinny"):
            if delta is not None:
                return self._product(norm(hidden, delta), activation, None)
            options = {"norm_weight": norm.weight, "eps": norm.eps, "activation": activation}
            return product_of(path)(hidden, self.weight, self.bias, **options)
        from octavo.kernels.rms_norm import quantise_rows

        width = self._scale_width(path)
        rows, scales = quantise_rows(hidden, norm.weight, norm.eps, delta=norm.whole(delta), width=width)
        return self._float8_product(path, rows, scales, hidden.dtype, activation, None)

    def into_stream(self, x: Tensor, hidden: Tensor) -> None:
        """See FusedLinear."""
        out = self._product(x, None, hidden)
        if out is not hidden:
            hidden.add_(out)

    def _product(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        """The product of x; residual, if it was added, else a new tensor."""
        path = choose_path(x.shape[0], self.weight)
        if path in ("gemv", "skinny"):
            return product_of(path)(x, self.weight, self.bias, activation=activation, residual=residual)
        from octavo.kernels.rms_norm import quantise_rows

        rows, scales = quantise_rows(x, width=self._scale_width(path))
        return self._float8_product(path, rows, scales, x.dtype, activation, residual)

    def _scale_width(self, path: Float8Path) -> int | None:
        """Numbers of a row of x that share a scale; None: all."""
        is_tiled = self.weight.width < self.weight.shape[1]
        return self.weight.width if path == "torch" and is_tiled else None

    def _float8_product(
        self,
        path: Float8Path,
        rows: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        activation: str | None,
        residual: Tensor | None,
    ) -> Tensor:
        """The product of float8 rows; residual, if it was added, else a new tensor of dtype."""
        if path == "torch":
            return activated(self._torch_product(rows, scales, dtype), activation)
        if path == "many":
            from octavo.gemm.hopper.float8.persistent_gemm import many_linear as product
        elif path == "hopper":
            from octavo.gemm.hopper.floats.dense_gemm import hopper_linear as product
        else:
            from octavo.gemm.portable.float8_gemm import float8_linear as product
        options = {"activation": activation, "residual": residual}
        return product(rows, self.weight, self.bias, row_scales=scales, dtype=dtype, **options)

    def _torch_product(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        of_rows, of_weight = ScalingType.RowWise, ScalingType.RowWise
        if weight.width < weight.shape[1]:
            of_rows, of_weight = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        operands = (rows, weight.values.t(), scales, of_rows, weight.scales.t(), of_weight)
        out = scaled_mm(*operands, output_dtype=torch.bfloat16).to(dtype)
        return out if self.bias is None else out.add_(self.bias)


def make_layer(weights: Sequence[Float8Weight], bias: Tensor | None) -> Float8GpuLinear | DequantisedLinear:
    """Return the layer of weights that lie above one another, with tiles of one width, and bias."""
    (weight,) = join_rows(weights)
    return (Float8GpuLinear if has_tiles(weight) else DequantisedLinear)(weight, bias)
