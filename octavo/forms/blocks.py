"""Weights in blocks: along each row, some small integers share a scale, and perhaps a minimum.

    weight = scale * q + min        q: 4 bits unsigned, or 8 bits signed

Checkpoints store such blocks: GGUF of 16 or 32 numbers, AWQ, GPTQ and compressed-tensors of 32 to whole rows.
CPUs multiply blocks of 32 as they are (gemm.cpu.block_linear), GPUs with Triton blocks of any multiple of 32,
packed (forms.packed). Rows can be cut, reordered and joined without touching a number; columns only between
blocks.
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
        scales: [N, K / n] float16 or float32; n = 16, 32 or a multiple of it.
        mins: like scales; None: 0.
        order: [K] int64, the column of x that each column meets (act-order of GPTQ); None: the same.
    """

    bits: int
    quants: Tensor
    scales: Tensor
    mins: Tensor | None
    order: Tensor | None = None

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
    def form(self) -> tuple[int, torch.dtype, int, bool, bytes | None]:
        """What joined weights have in common: bits, dtype and number of scales, minimums, order."""
        order = None if self.order is None else self.order.cpu().numpy().tobytes()
        return self.bits, self.scales.dtype, self.scales.shape[1], self.mins is not None, order

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order."""
        mins = None if self.mins is None else self.mins[rows]
        return type(self)(self.bits, self.quants[rows], self.scales[rows], mins, self.order)

    def join(self, below: Self) -> Self:
        """See QuantisedWeight."""
        mins = None
        if self.mins is not None and below.mins is not None:
            mins = torch.cat((self.mins, below.mins))
        quants, scales = torch.cat((self.quants, below.quants)), torch.cat((self.scales, below.scales))
        return type(self)(self.bits, quants, scales, mins, self.order)

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        mins, order = (None if each is None else each.to(device) for each in (self.mins, self.order))
        return type(self)(self.bits, self.quants.to(device), self.scales.to(device), mins, order)

    def in_blocks(self) -> Self:
        """Return the weight with scales for 32 numbers each, or as few as it has them for."""
        repeats = self.shape[1] // self.scales.shape[1] // BLOCK
        if repeats <= 1:
            return self
        scales, mins = (
            None if each is None else each.repeat_interleave(repeats, 1) for each in (self.scales, self.mins)
        )
        assert scales is not None
        return type(self)(self.bits, self.quants, scales, mins, self.order)

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        rows, columns = self.shape
        values = self.quants.view(rows, self.scales.shape[1], -1) * self.scales.float()[..., None]
        if self.mins is not None:
            values += self.mins.float()[..., None]
        values = values.view(rows, columns)
        return values if self.order is None else values[:, self.order.argsort()]
