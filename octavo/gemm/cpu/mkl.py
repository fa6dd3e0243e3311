"""Linear layers on CPUs whose weight MKL has laid out for itself once, rather than in every call."""

import torch
from torch import Tensor

from octavo.gemm.linear import UnfusedLinear

# MKL packs for a number of rows; this hint is as fast as the exact number from 1 to 512 rows.
_PACK_ROWS = 64


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why a weight cannot be packed, or None if it can."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"it needs float32 on a CPU, got {weight.dtype} on {weight.device}"
    if not torch.backends.mkl.is_available() or "_mkl_linear" not in dir(torch.ops.mkl):
        return "this torch is built without MKL's packed products"
    return None


class MklLinear(UnfusedLinear):
    """y = x W^T + b with a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack weight [out, in] float32 on the CPU (a copy: the original can be freed); keep bias [out]."""
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
        # The operator asks the unpacked weight only for its shape.
        self._shape = torch.empty(1, dtype=weight.dtype).expand(weight.shape)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] contiguous to [T, out]."""
        return torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self._bias, x.shape[0])
