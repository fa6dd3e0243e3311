"""Linear layers with a float8 weight on a CPU; x, sums and y are float32.

rows of x    by                                                            activations
few          C (gemm/cpu/c/float8.c)                                       float32
more         PyTorch; some outputs' weights become float32                 float32
             if they may be rounded, oneDNN; weights become bfloat16       bfloat16
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.base import join_rows
from octavo.forms.float8 import Float8Weight
from octavo.gemm.cpu import compiled_rows as few
from octavo.gemm.cpu.library import compile_failure
from octavo.gemm.dequantised import DequantisedLinear

DESCRIPTION = (
    "up to 16 rows by the C kernel, 256 if other matrices are float32; more are dequantised in each GEMM"
)

# For more rows oneDNN in bfloat16 is faster than the C kernel; float32 is not, on a CPU with AVX-512.
_FEW_ROWS, _FEW_ROWS_IN_FLOAT32 = 16, 256
# Numbers of a weight that are bfloat16 at a time: 4 MiB.
_CHUNK = 2**21
# The bits of a number that is none, but for its sign.
_NAN = 0x7F


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why float8 weights cannot be multiplied by x of a dtype on a device, or None if they can."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"it needs float32 on a CPU, got {dtype} on {device}"
    return compile_failure()


class Float8CpuLinear:
    """y = x W^T + b with a float8 weight."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None, *, rounds: bool = False) -> None:
        """Keep weight [N, K] and bias [N] float32, and whether many rows may be rounded to bfloat16."""
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        weight = Float8Weight(values, scales, weight.height, weight.width)
        self._weight, self._bias = weight, bias
        self._dequantised = DequantisedLinear(weight, bias)
        # The kernel makes numbers of what is none.
        is_exact = not bool((values.view(torch.uint8) & _NAN == _NAN).any())
        runs_in_c = is_exact and few.unsupported_reason(len(values)) is None
        self._few = few.CompiledFewRows.of_float8(weight, bias) if runs_in_c else None
        self._rounds = rounds and runs_in_c
        self._few_rows = _FEW_ROWS if self._rounds else _FEW_ROWS_IN_FLOAT32

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if self._few is not None and x.shape[0] <= self._few_rows:
            return self._few(x)
        return self._in_bfloat16(x) if self._rounds else self._dequantised(x)

    def _in_bfloat16(self, x: Tensor) -> Tensor:
        num_outputs, size = self._weight.shape
        rows, out = x.bfloat16(), x.new_empty(x.shape[0], num_outputs)
        step = max(1, _CHUNK // size)
        for start in range(0, num_outputs, step):
            stop = min(start + step, num_outputs)
            out[:, start:stop] = linear(rows, few.rows_in_bfloat16(self._weight, start, stop))
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
