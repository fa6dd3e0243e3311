"""Linear layers on GPUs whose weight stays packed in groups of 4 or 8 bits.

    rows of x        GEMM
    1                gemv: integers on tensor cores, for 4 bits in groups of 128 on Hopper GPUs; fuses norm,
                     activation and residual sum
    1 to 16          few: streams words through tensor cores; fuses activation and residual sum, and
                     the norm of a single row
    17 to 256        medium: dequantises tiles in registers; fuses activation and residual sum
                     hopper: the same by TMA and wgmma, for 4 bits on Hopper GPUs
    more             dequantises the whole weight, then cuBLAS

tiling.choose_grouped_gemm decides by rows, and each kernel's unsupported_reason by weight. Weights that
cannot be joined (other bits, groups or orders of columns) take a GEMM each.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.base import join_rows
from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import GroupedWeight
from octavo.gemm.fused import Norm, activated
from octavo.gemm.hopper.packed.packed_gemm_tiling import unsupported_reason as hopper_unsupported_reason
from octavo.gemm.hopper.packed.packed_gemv_tiling import unsupported_reason as gemv_unsupported_reason
from octavo.gemm.portable.packed.packed_tiling import choose_grouped_gemm
from octavo.kernels.device import nvidia_generation, triton_unsupported_reason

DESCRIPTION = "packed in groups, by GPU kernels"


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why packed weights cannot be multiplied by x of a dtype on a device, or None if they can."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16 on an NVIDIA GPU with Triton, got {dtype} on {device}"
    return triton_unsupported_reason(device.type)


def make_layer(weights: Iterable[BlockWeight], bias: Tensor | None) -> "GroupedLinear":
    """Return the layer of weights that lie above one another, [N_i, K] each, and bias [sum of N_i]."""
    return GroupedLinear([GroupedWeight.pack(weight) for weight in join_rows(weights)], bias)


class GroupedLinear:
    """A FusedLinear, y = x W^T + b."""

    def __init__(self, parts: Sequence[GroupedWeight], bias: Tensor | None) -> None:
        """Keep weights that lie above one another, [N_i, K] each, and bias [sum of N_i]."""
        self._parts = parts
        sizes = [part.shape[0] for part in parts]
        self._biases = [None] * len(parts) if bias is None else bias.split(sizes)

    @property
    def form(self) -> Hashable:
        """What kernels are compiled for, beside sizes."""
        return tuple((part.bits, part.group, part.shape, part.order is None) for part in self._parts)

    @property
    def has_gemv(self) -> bool:
        """Whether a single row is multiplied on a Hopper GPU: by the GEMV or few_linear."""
        return nvidia_generation(self._parts[0].words.device) == 9

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        products = [_product(x, part, bias) for part, bias in zip(self._parts, self._biases, strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """See FusedLinear."""
        if len(self._parts) > 1:
            out = self(norm(hidden, delta))
            return activated(out, activation)
        (part,), (bias,) = self._parts, self._biases
        if hidden.shape[0] == 1 and delta is None and part.order is None:
            options = {"norm_weight": norm.weight, "eps": norm.eps, "activation": activation}
            return _few_product(1, part)(hidden, part, bias, **options)
        return _product(norm(hidden, delta), part, bias, activation=activation)

    def into_stream(self, x: Tensor, hidden: Tensor) -> None:
        """See FusedLinear."""
        if len(self._parts) > 1:
            hidden.add_(self(x))
        else:
            _product(x, self._parts[0], self._biases[0], residual=hidden)


def _product(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias, then activated, or added to the residual in place."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    gemm = choose_grouped_gemm(x.shape[0])
    if gemm == "few":
        return _few_product(x.shape[0], weight)(x, weight, bias, activation=activation, residual=residual)
    if gemm == "medium" and hopper_unsupported_reason(x, weight, is_gated=activation is not None) is None:
        from octavo.gemm.hopper.packed.packed_gemm import hopper_medium_linear

        return hopper_medium_linear(x, weight, bias, activation=activation, residual=residual)
    if gemm == "medium":
        from octavo.gemm.portable.packed.medium import medium_linear

        return medium_linear(x, weight, bias, activation=activation, residual=residual)
    from octavo.gemm.portable.packed.dequantise import dequantise

    out = linear(x, dequantise(weight, x), bias)
    if residual is not None:
        return residual.add_(out)
    return activated(out, activation)


def _few_product(num_rows: int, weight: GroupedWeight) -> Callable[..., Tensor]:
    """Return the product of few rows and a weight."""
    if num_rows == 1 and gemv_unsupported_reason(weight) is None:
        from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear as product
    else:
        from octavo.gemm.portable.packed.rows_gemm import few_linear as product
    return product
