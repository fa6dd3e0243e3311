"""Linear layers with a float8 weight on a CPU; x, sums and y are float32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.base import join_rows
from octavo.forms.float8 import Float8Weight
from octavo.gemm.cpu import compiled_rows
from octavo.gemm.dequantised import DequantisedLinear
from octavo.gemm.linear import UnfusedLinear
from octavo.gemm.product import available, find
from octavo.gemm.table import PRODUCTS

# Numbers of a weight that are bfloat16 at a time: 4 MiB.
_CHUNK = 2**21
# Bit pattern of NaN, sign aside.
_NAN = 0x7F


class Float8CpuLinear(UnfusedLinear):
    """y = x W^T + b with a float8 weight.

    Attributes:
        weight: [N, K].
        runs_in_c: whether the C kernel can multiply by it.
        rounds: whether many rows may be rounded to bfloat16.
    """

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None, *, rounds: bool = False) -> None:
        """Keep weight [N, K] and bias [N] float32, and whether many rows may be rounded to bfloat16."""
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        self.weight = weight = Float8Weight(values, scales, weight.height, weight.width)
        self.rounds, self._bias = rounds, bias
        # The C kernel would take NaN for a number.
        is_exact = not bool((values.view(torch.uint8) & _NAN == _NAN).any())
        self.runs_in_c = is_exact and compiled_rows.unsupported_reason(len(values)) is None
        self._compiled = compiled_rows.CompiledFewRows.from_float8(weight, bias) if self.runs_in_c else None
        self.multiply_dequantised = DequantisedLinear(weight, bias)
        self._products = available(PRODUCTS["float8 on a CPU"], self, generation=0)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return getattr(self, find(self._products, x, self).launch)(x)

    def multiply_in_c(self, x: Tensor) -> Tensor:
        """Multiply in float32, in C (gemm/cpu/c/float8.c)."""
        assert self._compiled is not None, "the C kernel was not compiled"
        return self._compiled(x)

    def multiply_in_bfloat16(self, x: Tensor) -> Tensor:
        """Multiply by oneDNN; some outputs' weights become bfloat16 at a time."""
        num_outputs, size = self.weight.shape
        rows, out = x.bfloat16(), x.new_empty(x.shape[0], num_outputs)
        step = max(1, _CHUNK // size)
        for start in range(0, num_outputs, step):
            stop = min(start + step, num_outputs)
            out[:, start:stop] = linear(rows, compiled_rows.rows_in_bfloat16(self.weight, start, stop))
        return out if self._bias is None else out.add_(self._bias)


def make_layer(weights: Sequence[Any], bias: Tensor | None, *, rounds: bool = False) -> Float8CpuLinear:
    """Return the layer of weights of one form that lie above one another, and bias [sum of N_i].

    Args:
        weights: Float8Weights.
        bias: or None.
        rounds: whether many rows may be rounded to bfloat16.
    """
    (weight,) = join_rows(weights)
    return Float8CpuLinear(weight, bias, rounds=rounds)
