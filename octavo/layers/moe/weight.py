"""A projection of all experts of a layer in one tensor, perhaps of float8 or MXFP4 numbers with scales."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.gpu.device import nvidia_generation
from octavo.layers.linear.mxfp4.weight import BLOCK, Mxfp4Weight

# Kernels multiply so many columns at a time, which share a row's scale.
SCALED_COLUMNS = 128
# Kinds of quantised experts that kernels multiply as they are, and the NVIDIA GPUs that run these.
_LEAST_GENERATIONS = {"float8": 9, "mxfp4": 8}


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Weights [E, N, K]: values, or values times scales.

    Attributes:
        values: [E, N, K] contiguous, of the dtype of activations, or float8_e4m3fn.
        scales: [E, K / width, N] float32 contiguous, or None.
        width: numbers of a row that share a scale; K, or a multiple of SCALED_COLUMNS.
        bias: [E, N] contiguous, or None.
    """

    values: Tensor
    scales: Tensor | None = None
    width: int = 0
    bias: Tensor | None = None

    @property
    def form(self) -> Hashable:
        """What decides, beside sizes, which kernels multiply it."""
        return self.values.dtype, self.width, self.bias is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32."""
        values = self.values.float()
        if self.scales is None:
            return values
        scales = self.scales.transpose(1, 2).repeat_interleave(self.width, 2)
        return values * scales[..., : values.shape[2]]


@dataclass(frozen=True, slots=True)
class Mxfp4ExpertWeight:
    """Weights [E, N, K] in MXFP4; K is a multiple of 32. See layers.linear.mxfp4.

    A block of 32 numbers takes 16 bytes: the low bits of its byte i are number i, the high bits number
    16 + i, so that both are beside their neighbours' columns of x.

    Attributes:
        values: [E, N, K / 2] uint8, contiguous.
        exponents: [E, N, K / 32] uint8, contiguous.
        bias: [E, N] contiguous, or None.
    """

    values: Tensor
    exponents: Tensor
    bias: Tensor | None = None

    @property
    def form(self) -> Hashable:
        """See ExpertWeight."""
        return "mxfp4", self.bias is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32."""
        values = self.values.unflatten(2, (-1, BLOCK // 2))
        numbers = torch.cat((values & 15, values >> 4), 3).flatten(2)
        pairs = numbers[..., ::2] | (numbers[..., 1::2] << 4)
        return Mxfp4Weight(pairs.flatten(0, 1), self.exponents.flatten(0, 1)).dequantise().view(numbers.shape)


def split_blocks(values: Tensor) -> Tensor:
    """Return the bytes of Mxfp4Weight [N, K / 2] in the order of Mxfp4ExpertWeight."""
    values = values.unflatten(1, (-1, BLOCK // 2))
    numbers = torch.stack((values & 15, values >> 4), 3).flatten(2)
    return (numbers[..., : BLOCK // 2] | (numbers[..., BLOCK // 2 :] << 4)).flatten(1)


def stacks_kind(kind: str, device: torch.device) -> bool:
    """Return whether a GPU's kernels multiply stacked experts of a kind of quantised weight as they are."""
    return nvidia_generation(device) >= _LEAST_GENERATIONS.get(kind, 1000)


def describe_stacked(kind: str, device: torch.device) -> str | None:
    """Say how a GPU multiplies a kind that only experts have, or None."""
    if kind != "mxfp4" or not stacks_kind(kind, device):
        return None
    return "experts are dequantised tile by tile, in Triton kernels"
