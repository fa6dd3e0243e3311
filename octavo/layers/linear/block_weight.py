"""Weights in blocks: along each row, 32 small integers share a scale, and perhaps a minimum.

    weight = scale * q + min        q: 4 bits unsigned, or 8 bits signed

Checkpoints (GGUF) store such blocks, and CPUs multiply them as they are (linear.blocks). Rows can be cut,
reordered and joined without touching a number; columns only between blocks.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] in blocks.

    Attributes:
        bits: 4 or 8.
        quants: [N, K] uint8 in [0, 15], or int8; a byte each.
        scales: [N, K / n] float16 or float32; n = 32, or 16 where each half of a block has its own.
        mins: like scales, n = 32; None: 0.
    """

    bits: int
    quants: Tensor
    scales: Tensor
    mins: Tensor | None

    @property
    def kind(self) -> str:
        """See QuantisedWeight."""
        return "blocks"

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.quants.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.quants.shape
        return rows, columns

    @property
    def form(self) -> tuple[int, torch.dtype, int, bool]:
        """What weights must have in common to be joined: bits, dtype and number of scales, minimums."""
        return self.bits, self.scales.dtype, self.scales.shape[1], self.mins is not None

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order."""
        mins = None if self.mins is None else self.mins[rows]
        return type(self)(self.bits, self.quants[rows], self.scales[rows], mins)

    def join(self, below: Self) -> Self:
        """See QuantisedWeight."""
        mins = None
        if self.mins is not None and below.mins is not None:
            mins = torch.cat((self.mins, below.mins))
        quants, scales = torch.cat((self.quants, below.quants)), torch.cat((self.scales, below.scales))
        return type(self)(self.bits, quants, scales, mins)

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        mins = None if self.mins is None else self.mins.to(device)
        return type(self)(self.bits, self.quants.to(device), self.scales.to(device), mins)

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        rows, columns = self.shape
        values = self.quants.view(rows, self.scales.shape[1], -1) * self.scales.float()[..., None]
        if self.mins is not None:
            values += self.mins.float()[..., None]
        return values.view(rows, columns)
