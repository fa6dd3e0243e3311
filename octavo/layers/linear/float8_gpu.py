"""Linear layers with a float8 weight on an NVIDIA GPU.

    path      rows of x    activations    what the GEMM fuses
    skinny    a few        as they are    norm, activation and residual sum
    narrow    some         as they are    activation and residual sum
    float8    more         float8         activation and residual sum
    torch     many         float8         nothing

float8_tiling.choose_path decides. Rows of x become float8 with a scale each, in the kernel that norms them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo.layers.linear.float8 import Float8Linear
from octavo.layers.linear.float8_tiling import NARROW_MAX_ROWS, choose_path, has_tiles, unsupported_reason
from octavo.layers.linear.float8_weight import Float8Weight
from octavo.layers.linear.fused import Norm
from octavo.layers.linear.quantised import join_rows

__all__ = ["DESCRIPTION", "Float8GpuLinear", "make_layer", "unsupported_reason"]

DESCRIPTION = f"activations as they are up to {NARROW_MAX_ROWS} rows, float8 beyond, by GPU kernels"


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
        if path == "skinny" and delta is None:
            from octavo.layers.linear.skinny import skinny_linear

            options = {"norm_weight": norm.weight, "eps": norm.eps, "activation": activation}
            return skinny_linear(hidden, self.weight, self.bias, **options)
        if path in ("skinny", "narrow"):
            return self._product(norm(hidden, delta), activation, None)
        from octavo.layers.triton.quantise import quantise_rows

        rows, scales = quantise_rows(hidden, norm.weight, norm.eps, delta=norm.whole(delta))
        if path == "float8":
            return self._rows_product(rows, scales, hidden.dtype, activation, None)
        out = self._torch_product(rows, scales, hidden.dtype)
        if activation is None:
            return out
        from octavo.layers.triton.activation import gated_activation

        return gated_activation(out, activation)

    def into_stream(self, x: Tensor, hidden: Tensor) -> None:
        """See FusedLinear."""
        out = self._product(x, None, hidden)
        if out is not hidden:
            hidden.add_(out)

    def _product(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        """The product of x as it is given; residual, if it was added, else a new tensor."""
        path = choose_path(x.shape[0], self.weight)
        if path == "skinny":
            from octavo.layers.linear.skinny import skinny_linear

            return skinny_linear(x, self.weight, self.bias, activation=activation, residual=residual)
        if path == "narrow":
            from octavo.layers.linear.float8_gemm import float8_linear

            return float8_linear(x, self.weight, self.bias, activation=activation, residual=residual)
        from octavo.layers.triton.quantise import quantise_rows

        rows, scales = quantise_rows(x)
        if path == "float8":
            return self._rows_product(rows, scales, x.dtype, activation, residual)
        return self._torch_product(rows, scales, x.dtype)

    def _rows_product(
        self,
        rows: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        activation: str | None,
        residual: Tensor | None,
    ) -> Tensor:
        from octavo.layers.linear.float8_gemm import float8_linear

        return float8_linear(
            rows,
            self.weight,
            self.bias,
            row_scales=scales,
            dtype=dtype,
            activation=activation,
            residual=residual,
        )

    def _torch_product(self, rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        weight, by_row = self.weight, ScalingType.RowWise
        out = scaled_mm(
            rows, weight.values.t(), scales, by_row, weight.scales.t(), by_row, output_dtype=torch.bfloat16
        ).to(dtype)
        return out if self.bias is None else out.add_(self.bias)


def make_layer(weights: Sequence[Float8Weight], bias: Tensor | None) -> Float8GpuLinear | Float8Linear:
    """Return the layer of weights that lie above one another, with tiles of one width, and bias."""
    (weight,) = join_rows(weights)
    return (Float8GpuLinear if has_tiles(weight) else Float8Linear)(weight, bias)
