"""A projection of all experts of a layer in MXFP4, packed for a GPU's kernels."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.gpu.device import nvidia_generation
from octavo.layers.linear.mxfp4.weight import Mxfp4Weight

# Units of a block of MXFP4.
_UNITS = 8
LARGEST_EXPONENT = 128
"""Of MXFP4 experts on a GPU, 127 too large: kernels halve the distance to the smallest number of a float."""


@dataclass(frozen=True, slots=True)
class Mxfp4ExpertWeight:
    """Weights [E, N, K] in MXFP4; K is a multiple of 32. See layers.linear.mxfp4.

    Attributes:
        values: [E, N, K / 4] int16, contiguous: units, see pack_units.
        exponents: [E, N, K / 32] uint8, contiguous; at most LARGEST_EXPONENT.
        bias: [E, N] contiguous, or None.
    """

    values: Tensor
    exponents: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        number, rows, num_units = self.values.shape
        return number, rows, 4 * num_units

    @property
    def form(self) -> Hashable:
        """See ExpertWeight."""
        return "mxfp4", self.bias is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32."""
        units = self.values.int().unflatten(2, (-1, _UNITS))
        planes = [(units >> 12 - 3 * plane & 8) | (units >> 6 - 3 * plane & 7) for plane in range(3)]
        planes.append((units >> 11 & 12) | (units >> 10 & 3))
        codes = torch.stack(planes, 3).flatten(2)
        pairs = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        return Mxfp4Weight(pairs.flatten(0, 1), self.exponents.flatten(0, 1)).dequantise().view(codes.shape)


def pack_units(values: Tensor) -> Tensor:
    """Return bytes [N, K / 2] of an Mxfp4Weight as units [N, K / 4] int16, of four numbers each.

    A block of 32 has 8 units. Unit i has its numbers i, 8 + i, 16 + i and 24 + i, each a sign and a
    magnitude:

        bit       15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
        number    0s 3s 3m 1s 3m 3m 2s 0m 0m 0m 1m 1m 1m 2m 2m 2m
    """
    codes = torch.stack((values & 15, values >> 4), 2).int().view(len(values), -1, 4, _UNITS)
    first, second, third, last = codes.unbind(2)
    units = (first & 8) << 12 | (first & 7) << 6
    units |= (second & 8) << 9 | (second & 7) << 3
    units |= (third & 8) << 6 | (third & 7)
    units |= (last & 12) << 11 | (last & 3) << 10
    return units.to(torch.int16).flatten(1)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why MXFP4 experts cannot be multiplied by x of a dtype on a GPU, or None if they can."""
    generation = nvidia_generation(device)
    return None if generation >= 8 else f"MXFP4 experts need compute capability 8.0, got {generation}.x"
