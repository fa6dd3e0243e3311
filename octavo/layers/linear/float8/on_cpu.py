"""Linear layers with a float8 weight on a CPU, float32: activations and sums are not rounded.

rows of x    by
few          C (layers/cpu/float8.c)
more         PyTorch, which dequantises some outputs' weights in each GEMM
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.layers.cpu import few
from octavo.layers.cpu.library import compile_failure
from octavo.layers.linear.dequantised import DequantisedLinear
from octavo.layers.linear.float8.weight import Float8Weight
from octavo.layers.linear.quantised import join_rows

DESCRIPTION = "few rows by the C kernel, more dequantised in each GEMM"

# Measured up to 1,024 rows on a CPU with AVX-512; others may multiply floats faster.
_FEW_ROWS = 256
# The bits of a number that is none, but for its sign.
_NAN = 0x7F


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why float8 weights cannot be multiplied by x of a dtype on a device, or None if they can."""
    if device.type != "cpu" or dtype != torch.float32:
        return f"it needs float32 on a CPU, got {dtype} on {device}"
    return compile_failure()


class Float8CpuLinear:
    """y = x W^T + b with a float8 weight."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None) -> None:
        """Keep weight [N, K] and bias [N] float32."""
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        weight = Float8Weight(values, scales, weight.height, weight.width)
        self._many = DequantisedLinear(weight, bias)
        # The kernel makes numbers of what is none.
        is_exact = not bool((values.view(torch.uint8) & _NAN == _NAN).any())
        runs_in_c = is_exact and few.unsupported_reason(len(values)) is None
        self._few = few.CompiledFewRows.of_float8(weight, bias) if runs_in_c else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if self._few is not None and x.shape[0] <= _FEW_ROWS:
            return self._few(x)
        return self._many(x)


def make_layer(weights: Sequence[Float8Weight], bias: Tensor | None) -> Float8CpuLinear | DequantisedLinear:
    """Return the layer of weights of one form that lie above one another, and bias [sum of N_i]."""
    (weight,) = join_rows(weights)
    return Float8CpuLinear(weight, bias)
