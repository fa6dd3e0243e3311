"""Weights in blocks: along each row, 32 small integers share a scale, and perhaps a minimum.

    weight = scale * q + min        q: 4 bits unsigned, or 8 bits signed

Checkpoints (GGUF) store such blocks, and CPUs multiply them as they are (linear.blocks). Rows can be cut,
reordered and joined without touching a number; columns only between blocks.
"""

from collections.abc import Iterable
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

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        rows, columns = self.shape
        values = self.quants.view(rows, self.scales.shape[1], -1) * self.scales.float()[..., None]
        if self.mins is not None:
            values += self.mins.float()[..., None]
        return values.view(rows, columns)


def join_rows(weights: Iterable[BlockWeight]) -> list[BlockWeight]:
    """Join neighbours of one form: what is left is the fewest weights that make the same rows."""
    joined: list[BlockWeight] = []
    for weight in weights:
        if joined and joined[-1].form == weight.form:
            joined[-1] = _join(joined[-1], weight)
        else:
            joined.append(weight)
    return joined


def _join(first: BlockWeight, second: BlockWeight) -> BlockWeight:
    mins = None
    if first.mins is not None and second.mins is not None:
        mins = torch.cat((first.mins, second.mins))
    return BlockWeight(
        first.bits,
        torch.cat((first.quants, second.quants)),
        torch.cat((first.scales, second.scales)),
        mins,
    )
