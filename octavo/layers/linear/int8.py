"""8-bit linear layers for CPUs: per-output-channel weights, per-row activations, both symmetric."""

from functools import cache

import torch
from torch import Tensor

_LIMIT = 127
# For CPUs that add pairs of products in 16 bits: 255 * 63 * 2 is the largest sum that fits.
_LIMIT_OF_16_BIT_SUMS = 63


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why the product with a weight cannot run in int8, or None if it can."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"it needs float32 on a CPU, got {weight.dtype} on {weight.device}"
    if "onednn" not in torch.backends.quantized.supported_engines:
        return "this torch is built without oneDNN's quantized operators"
    return None


def describe() -> str:
    """Say how it multiplies."""
    return "8-bit activations, by oneDNN"


class Int8Linear:
    """y = x W^T + b with int8 operands and int32 sums.

    Each row of x has a scale of its own, so a row's result does not depend on the rows it is batched
    with. The scale is applied to the result, which leaves the operator a constant activation scale of 1.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise and pack weight [out, in] float32 (a copy); keep bias [out] float32."""
        scale = _row_scale(weight, _LIMIT_OF_16_BIT_SUMS if _sums_saturate() else _LIMIT)
        quantised = (weight / scale).round_().to(torch.int8)
        self._packed = _pack(quantised)
        self._scale = scale[:, 0].contiguous()
        self._zero_point = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] float32 to [T, out] float32."""
        scale = _row_scale(x)
        quantised = x.div(scale).round_().to(torch.int8)
        product = _product(quantised, self._packed, self._scale, self._zero_point)
        product.mul_(scale)
        return product if self._bias is None else product.add_(self._bias)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.onednn.qlinear_prepack(weight, None)


def _product(x: Tensor, packed: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """[T, in] int8 by packed int8 weights [out, in], times scale [out]; a new [T, out] float32."""
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scale, zero_point, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def _sums_saturate() -> bool:
    """True on CPUs without 8-bit dot products (VNNI), where oneDNN adds up pairs of products in 16 bits."""
    most = torch.full((1, 64), _LIMIT, dtype=torch.int8)
    one, zero = torch.ones(1, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    return _product(most, _pack(most.clone()), one, zero).item() != 64 * _LIMIT**2


def _row_scale(x: Tensor, limit: int = _LIMIT) -> Tensor:
    """[rows, 1] size of one int8 step per row; for a row of zeros a tiny positive one."""
    return x.abs().amax(-1, True).clamp_min_(torch.finfo(x.dtype).tiny * 2**10).div_(limit)
