"""One way in for all linear layers: pick how y = x W^T + b is computed, and pack the weight for it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.errors import ConfigError
from octavo.gpu.device import has_triton
from octavo.layers.linear.int8 import Int8Linear, int8_unavailable_reason

Linear = Callable[[Tensor], Tensor]

# MKL packs for a number of rows; this hint is as fast as the exact number from 1 to 512 rows.
_PACK_ROWS = 64


class PlainLinear:
    """y = x W^T + b in the weight's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return linear(x, self.weight, self.bias)


class PackedLinear:
    """y = x W^T + b with a weight that MKL has laid out for itself once, rather than in every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack weight [out, in] float32 on the CPU (a copy: the original can be freed); keep bias [out]."""
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
        # The operator asks the unpacked weight only for its shape.
        self._shape = torch.empty(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] contiguous to [T, out]."""
        return torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self._bias, x.shape[0])


def make_linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """Return a callable from [T, in] to [T, out] in the dtype of x.

    Args:
        weight: [out, in]; copied where packing pays off, else kept.
        bias: [out], or None.
        quantization: "none", or "int8" for 8-bit weights and activations (CPU, float32).

    Raises:
        ConfigError: int8 was asked for and cannot run here.
    """
    if quantization == "int8":
        reason = int8_unavailable_reason(weight)
        if reason is not None:
            raise ConfigError(f'quantization="int8" cannot run: {reason}; use quantization="none"')
        return Int8Linear(weight, bias)
    if quantization != "none":
        raise ConfigError(f'quantization must be "none" or "int8", got {quantization!r}')
    return (PackedLinear if _can_pack(weight) else PlainLinear)(weight, bias)


def make_invariant_linear(
    weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Linear:
    """Return a callable from [T, in] to [T, out] in which no row's bits depend on the other rows.

    Args:
        weight: [out, in].
        bias: [out], or None.
        dtype: of results; None: that of x.

    Raises:
        ConfigError: the weight is not on a GPU with Triton.
    """
    if not has_triton(weight):
        raise ConfigError(
            f"deterministic=True needs an NVIDIA GPU with Triton, got weights on {weight.device}; "
            "use deterministic=False, or a GPU"
        )
    from octavo.layers.linear.invariant import InvariantLinear

    return InvariantLinear(weight, bias, dtype=dtype)


def _can_pack(weight: Tensor) -> bool:
    is_float_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_float_on_cpu and torch.backends.mkl.is_available() and "_mkl_linear" in dir(torch.ops.mkl)
