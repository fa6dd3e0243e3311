"""8-bit linear layers for CPUs: per-output-channel weights, per-row activations, both symmetric."""

import torch
from torch import Tensor

_LIMIT = 127


def int8_unavailable_reason(weight: Tensor) -> str | None:
    """Say why a weight cannot run in int8; None: it can."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"it needs float32 on a CPU, got {weight.dtype} on {weight.device}"
    if "onednn" not in torch.backends.quantized.supported_engines:
        return "this torch is built without oneDNN's quantized operators"
    return None


class Int8Linear:
    """y = x W^T + b with int8 operands and int32 sums.

    Each row of x has a scale of its own, so a row's result does not depend on the rows it is batched
    with. The scale is applied to the result, which leaves the operator a constant activation scale of 1.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise and pack weight [out, in] float32 (a copy); keep bias [out] float32."""
        scale = _row_scale(weight)
        quantised = (weight / scale).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(quantised, None)
        self._scale = scale[:, 0].contiguous()
        self._zero_point = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] float32 to [T, out] float32."""
        scale = _row_scale(x)
        product = torch.ops.onednn.qlinear_pointwise(
            x.div(scale).round_().to(torch.int8),
            1.0,
            0,
            self._packed,
            self._scale,
            self._zero_point,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        product.mul_(scale)
        return product if self._bias is None else product.add_(self._bias)


def _row_scale(x: Tensor) -> Tensor:
    """[rows, 1] size of one int8 step per row; a row of zeros gets a harmless positive one."""
    return x.abs().amax(-1, True).clamp_min_(torch.finfo(x.dtype).tiny * 2**10).div_(_LIMIT)
