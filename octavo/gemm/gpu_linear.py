"""Linear layers on a GPU with Triton, for weights of every form: gemm.table has their products by rows of x.

Rows of x become float8, where a product of float8 weights needs that, in the kernel that norms them.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.forms.base import weight_kind
from octavo.gemm.gated import activate_and_multiply
from octavo.gemm.linear import Linear, Norm
from octavo.gemm.product import Product, available, find
from octavo.gemm.table import PRODUCTS
from octavo.kernels.device import nvidia_generation


class GpuLinear:
    """A Linear of one weight: a tensor [N, K], or one of a form that PRODUCTS has.

    Attributes:
        weight: as it is, or packed.
        bias: [N] or None.
        products: those that can multiply by the weight, the fastest first.
    """

    def __init__(self, weight: Any, bias: Tensor | None = None) -> None:
        """Keep weight and bias [N]."""
        self.weight = weight
        self.bias = bias
        self.products = available(PRODUCTS[weight_kind(weight)], weight)
        self._order: Tensor | None = getattr(weight, "order", None)

    @property
    def form(self) -> Hashable:
        """See Linear."""
        return weight_kind(self.weight), getattr(self.weight, "kernel_form", None)

    @property
    def has_gemv(self) -> bool:
        """See Linear."""
        single = next(row for row in self.products if row.rows[0] <= 1 <= row.rows[1])
        return single.streams and nvidia_generation(self.weight.device) == 9

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        x, product = self._find(x)
        return self._multiply(product, x, None, None)

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """See Linear."""
        if self._order is not None:
            x, product = self._find(norm(hidden, delta), is_gated=activation is not None)
            return self._multiply(product, x, activation, None)
        product = find(self.products, hidden, self.weight, is_gated=activation is not None)
        if delta is None and hidden.shape[0] <= product.norms:
            options = {"norm_weight": norm.weight, "eps": norm.eps, "activation": activation}
            return product.run(hidden, self.weight, self.bias, **options)
        if not product.rounds:
            return self._multiply(product, norm(hidden, delta), activation, None)
        from octavo.kernels.rms_norm import quantise_rows

        width = self._scale_width(product)
        stream = {"delta": norm.whole(delta), "stream_scale": norm.stream_scale}
        rows, scales = quantise_rows(hidden, norm.weight, norm.eps, width=width, **stream)
        return self._multiply_rounded(product, rows, scales, hidden.dtype, activation, None)

    def into_stream(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See Linear."""
        x, product = self._find(x)
        if not product.fuses:
            return product.run(x, self.weight, self.bias)
        self._multiply(product, x, None, hidden)
        return None

    def _find(self, x: Tensor, *, is_gated: bool = False) -> tuple[Tensor, Product]:
        """Return rows in the order of the weight's columns, and their product."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        return x, find(self.products, x, self.weight, is_gated=is_gated)

    def _multiply(
        self, product: Product, x: Tensor, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        """Return the product of x, activated; or residual, to which it was added."""
        if not product.fuses:
            out = product.run(x, self.weight, self.bias)
            return out if activation is None else activate_and_multiply(out, activation)
        if not product.rounds:
            return product.run(x, self.weight, self.bias, activation=activation, residual=residual)
        from octavo.kernels.rms_norm import quantise_rows

        rows, scales = quantise_rows(x, width=self._scale_width(product))
        return self._multiply_rounded(product, rows, scales, x.dtype, activation, residual)

    def _multiply_rounded(
        self,
        product: Product,
        rows: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        activation: str | None,
        residual: Tensor | None,
    ) -> Tensor:
        options = {"activation": activation, "residual": residual}
        return product.run(rows, self.weight, self.bias, row_scales=scales, dtype=dtype, **options)

    def _scale_width(self, product: Product) -> int | None:
        """Return how many numbers of a row of x share a scale; None: all."""
        width = self.weight.width
        return width if product.rounds == "tiles" and width < self.weight.shape[1] else None


class JoinedLinear:
    """A Linear of weights that lie above one another and cannot be joined, a product for each.

    They have other bits, groups or orders of columns.
    """

    def __init__(self, parts: Sequence[GpuLinear]) -> None:
        """Keep layers of [N_i, K] each."""
        self.parts = parts

    @property
    def form(self) -> Hashable:
        """See Linear."""
        return tuple(part.form for part in self.parts)

    @property
    def has_gemv(self) -> bool:
        """See Linear."""
        return self.parts[0].has_gemv

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return torch.cat([part(x) for part in self.parts], 1)

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """See Linear."""
        out = self(norm(hidden, delta))
        return out if activation is None else activate_and_multiply(out, activation)

    def into_stream(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See Linear."""
        hidden.add_(self(x))
        return None


def make_layer(weights: Sequence[Any], bias: Tensor | None) -> Linear:
    """Return the layer of weights that lie above one another, [N_i, K] each, and bias [sum of N_i]."""
    sizes = [weight.shape[0] for weight in weights]
    biases = [None] * len(weights) if bias is None else bias.split(sizes)
    parts = [GpuLinear(weight, own) for weight, own in zip(weights, biases, strict=True)]
    return parts[0] if len(parts) == 1 else JoinedLinear(parts)
