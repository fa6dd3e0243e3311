"""Products of a few rows with weights in bfloat16, in C, called through ctypes."""

import torch
from torch import Tensor

from octavo.layers.cpu.library import compile_failure, layers_library

# Outputs that the kernel sums at a time.
_OUTPUTS = 4


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why a weight [N, K] cannot be multiplied so, or None if it can."""
    if weight.shape[0] < _OUTPUTS:
        return f"it needs at least {_OUTPUTS} outputs, got {weight.shape[0]}"
    return compile_failure()


class CompiledBfloat16:
    """x W^T + b; x, sums and results are float32. No bit of a row depends on the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [N, K] bfloat16 and bias [N] float32, both contiguous.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        self._alive = (weight, bias)
        self._operands = weight.data_ptr(), None if bias is None else bias.data_ptr()
        self._num_outputs, self._size = weight.shape
        self._multiply = layers_library().octavo_bfloat16_linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float32 to a new [T, N] float32."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self._num_outputs, dtype=torch.float32)
        sizes = x.shape[0], self._size, self._num_outputs
        self._multiply(*self._operands, x.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
        return out
