"""Products of a few rows with weights in float8, in C, called through ctypes."""

import torch
from torch import Tensor

from octavo.layers.cpu.bfloat16 import unsupported_reason
from octavo.layers.cpu.library import layers_library
from octavo.layers.linear.float8.weight import Float8Weight

__all__ = ["CompiledFloat8", "unsupported_reason"]


class CompiledFloat8:
    """x W^T + b; x, sums and results are float32. No bit of a row depends on the other rows."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        """Keep weight [N, K], none of its numbers NaN, and bias [N] float32, all contiguous.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        self._alive = (weight, bias)
        tensors = weight.values.data_ptr(), weight.scales.data_ptr()
        self._operands = *tensors, weight.height, weight.width, None if bias is None else bias.data_ptr()
        self._num_outputs, self._size = weight.shape
        self._multiply = layers_library().octavo_float8_linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float32 to a new [T, N] float32."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_outputs, dtype=torch.float32)
        sizes = x.shape[0], self._size, self._num_outputs
        self._multiply(*self._operands, x.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
        return out
