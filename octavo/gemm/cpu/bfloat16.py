"""Linear layers on CPUs whose weight is bfloat16, as most checkpoints store it; x, sums and y are float32."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.gemm.cpu.compiled_rows import CompiledFewRows
from octavo.gemm.cpu.matrix_units import matrix_units
from octavo.gemm.linear import UnfusedLinear
from octavo.gemm.product import available, find
from octavo.gemm.table import PRODUCTS

# Numbers of a weight that are float32 at a time: 4 MiB.
_CHUNK = 2**20


class Bfloat16Linear(UnfusedLinear):
    """y = x W^T + b with a weight in bfloat16.

    Attributes:
        weight: [out, in] bfloat16.
        units: the CPU's for bfloat16, see matrix_units.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [out, in], rounded to bfloat16 if it is float32, and bias [out] float32."""
        self.weight = weight.bfloat16().contiguous()
        self.units = matrix_units()
        self._bias = bias
        self._products = available(PRODUCTS["bfloat16"], self, generation=0)
        runs_in_c = any(row.launch == "multiply_in_c" for row in self._products)
        self._compiled = CompiledFewRows.from_bfloat16(self.weight, bias) if runs_in_c else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] float32 to [T, out] float32."""
        return getattr(self, find(self._products, x, self).launch)(x)

    def multiply_in_c(self, x: Tensor) -> Tensor:
        """Multiply in float32, in C (gemm/cpu/c/few.c)."""
        assert self._compiled is not None, "the C kernel was not compiled"
        return self._compiled(x)

    def multiply_in_bfloat16(self, x: Tensor) -> Tensor:
        """Multiply by oneDNN, rows in bfloat16, too."""
        out = linear(x.bfloat16(), self.weight).float()
        return out if self._bias is None else out.add_(self._bias)

    def multiply_widened(self, x: Tensor) -> Tensor:
        """Multiply by MKL; some outputs' weights become float32 at a time."""
        num_outputs, size = self.weight.shape
        out = x.new_empty(x.shape[0], num_outputs)
        step = max(1, _CHUNK // size)
        for start in range(0, num_outputs, step):
            part = slice(start, start + step)
            torch.mm(x, self.weight[part].float().T, out=out[:, part])
        return out if self._bias is None else out.add_(self._bias)
