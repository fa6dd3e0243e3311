"""Products of a few rows with weights in bfloat16 or float8, in C, called through ctypes."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from octavo.forms.float8 import Float8Weight
from octavo.gemm.cpu.library import compile_failure, layers_library

# Outputs that the kernel sums at a time.
_OUTPUTS = 4


def unsupported_reason(num_outputs: int) -> str | None:
    """Return why a weight of so many rows cannot be multiplied so, or None if it can."""
    if num_outputs < _OUTPUTS:
        return f"it needs at least {_OUTPUTS} outputs, got {num_outputs}"
    return compile_failure()


class CompiledFewRows:
    """x W^T + b; x, sums and results are float32. No bit of a row depends on the other rows."""

    def __init__(
        self,
        multiply: Callable[..., None],
        weight: Tensor | Float8Weight,
        described: tuple[Any, ...],
        bias: Tensor | None,
    ) -> None:
        """Keep the function, the weight [N, K], what describes it to the function, and the bias."""
        self._multiply = multiply
        self._operands = *described, None if bias is None else bias.data_ptr()
        self._num_outputs, self._size = weight.shape
        self._alive = weight, bias

    @classmethod
    def from_bfloat16(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Keep weight [N, K] bfloat16 and bias [N] float32, both contiguous.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        return cls(layers_library().octavo_bfloat16_linear, weight, (weight.data_ptr(),), bias)

    @classmethod
    def from_float8(cls, weight: Float8Weight, bias: Tensor | None) -> Self:
        """Keep weight [N, K], none of its numbers NaN, and bias [N] float32, all contiguous.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        return cls(layers_library().octavo_float8_linear, weight, _described(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float32 to a new [T, N] float32."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_outputs, dtype=torch.float32)
        sizes = x.shape[0], self._size, self._num_outputs
        self._multiply(*self._operands, x.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
        return out


def rows_in_bfloat16(weight: Float8Weight, start: int, stop: int) -> Tensor:
    """Return rows of a weight [N, K], times their scales, rounded to bfloat16, a new [stop - start, K].

    Raises:
        KernelUnavailableError: the kernel cannot be compiled.
    """
    size = weight.shape[1]
    out = torch.empty(stop - start, size, dtype=torch.bfloat16)
    operands = *_described(weight), start, stop, size, out.data_ptr()
    layers_library().octavo_float8_rows(*operands, torch.get_num_threads())
    return out


def _described(weight: Float8Weight) -> tuple[Any, ...]:
    return weight.values.data_ptr(), weight.scales.data_ptr(), weight.height, weight.width
