"""Weights of MXFP4: 4-bit floats (e2m1), 32 of which share a power of two (e8m0).

    weight = number * 2 ** (exponent - 127)

    a number's bits    s e e m     000 to 111: 0, 0.5, 1, 1.5, 2, 3, 4, 6

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
"""

from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from octavo.errors import ConfigError, WeightsError
from octavo.forms.base import Storage
from octavo.forms.blocks import BlockWeight

BLOCK = 32
"""Values that share an exponent; they take 16 bytes."""
MXFP4 = Storage("mxfp4", 0.5 + 1 / BLOCK, form="MXFP4", tile=(1, BLOCK))
# For matrices that are not experts: a GPU's kernels multiply them as integers of 8 bits, see in_bytes.
MXFP4_DENSE = Storage("mxfp4", 0.5 + 1 / BLOCK, bytes_on_gpu=1 + 4 / BLOCK, form="MXFP4", tile=(1, BLOCK))
# The exponent that stands for NaN.
_NAN = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A QuantisedWeight [N, K]; K is a multiple of BLOCK.

    Attributes:
        values: [N, K / 2] uint8, two numbers in a byte, the first one in its low bits.
        exponents: [N, K / BLOCK] uint8 below 255, each 127 too large.
    """

    values: Tensor
    exponents: Tensor

    @property
    def kind(self) -> str:
        """See QuantisedWeight."""
        return MXFP4.kind

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.values.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, num_bytes = self.values.shape
        return rows, 2 * num_bytes

    @property
    def form(self) -> None:
        """All such weights can be joined."""
        return

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order."""
        return type(self)(self.values[rows], self.exponents[rows])

    def join(self, below: Self) -> Self:
        """See QuantisedWeight."""
        pairs = ((self.values, below.values), (self.exponents, below.exponents))
        return type(self)(*(torch.cat(pair) for pair in pairs))

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        return type(self)(self.values.to(device), self.exponents.to(device))

    def part(self, start: int, stop: int) -> Self:
        """Return the rows from start to stop, which may lie beyond the last one."""
        return type(self)(self.values[start:stop], self.exponents[start:stop])

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32, exactly."""
        pairs, scales = _tables(self.device)
        numbers = embedding(self.values.int(), pairs).view(*self.exponents.shape, BLOCK)
        return (numbers * embedding(self.exponents.int(), scales)).view(self.shape)

    def in_bytes(self) -> BlockWeight:
        """Return the same weight of integers, each twice its number, and scales half as large."""
        _, scales = _tables(self.device)
        halves = embedding(self.exponents.int(), scales).view(self.exponents.shape) / 2
        return BlockWeight(8, doubled(self.values), halves, None)


def doubled(values: Tensor) -> Tensor:
    """Return twice the numbers of [N, K / 2] bytes, [N, K] int8."""
    pairs, _ = _tables(values.device)
    # An embedding makes no index of 8 bytes for each byte.
    return embedding(values.int(), (2 * pairs).to(torch.int8)).flatten(1)


def block_slice(name: str, start: int, stop: int) -> slice:
    """Return the blocks of a matrix's columns from start to stop.

    Raises:
        ConfigError: they cut numbers that share an exponent.
    """
    if start % BLOCK or stop % BLOCK:
        raise ConfigError(
            f"{name} cannot have the columns from {start} to {stop} by themselves: {BLOCK} of them share an "
            f"exponent; use sizes that are multiples of {BLOCK}, or fewer ranks"
        )
    return slice(start // BLOCK, stop // BLOCK)


def check_exponents(name: str, exponents: Tensor) -> None:
    """Check exponents as they are stored, uint8.

    Raises:
        WeightsError: one stands for no number.
    """
    if bool((exponents == _NAN).any()):
        raise WeightsError(f"{name} has exponents of {_NAN}, which stand for no number")


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of each byte [256, 2] and the scale of each exponent [256, 1], float32."""
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((numbers[byte & 15], numbers[byte >> 4]), 1)
    powers = [[2.0 ** (exponent - 127)] for exponent in range(255)]
    scales = torch.tensor([*powers, [torch.nan]], dtype=torch.float32)
    return pairs.to(device), scales.to(device)
