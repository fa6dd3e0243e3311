"""Weights in blocks, byte for byte as a GGUF file stores them.

The C kernel needs the same bytes in another order (gemm/cpu/c/tiles.c). Others unpack them first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from octavo.forms.base import QuantisedWeight
from octavo.forms.blocks import BLOCK
from octavo.forms.mxfp4 import MXFP4


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight [N, K] in blocks of 32 numbers, on a CPU.

    Attributes:
        bits: of a number, 4 or 8.
        has_mins: a block has a minimum.
        stored: [N, K / 32, bytes of a block] uint8, contiguous: a scale, perhaps a minimum, both float16, and
            the numbers: number i in the low and number i + 16 in the high half of byte i, or 32 int8. Blocks
            of MXFP4 have an exponent, a byte, and such codes.
        unpack: makes the same weight of `stored` in another form.
    """

    bits: int
    has_mins: bool
    stored: Tensor
    unpack: Callable[[Tensor], QuantisedWeight]

    @property
    def kind(self) -> str:
        """See QuantisedWeight."""
        return MXFP4.kind if self.stored.shape[2] % 2 else "blocks"

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.stored.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.stored.shape[0], self.stored.shape[1] * BLOCK

    @property
    def form(self) -> tuple[str, int, bool]:
        """What joined weights have in common."""
        return self.kind, self.bits, self.has_mins

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order."""
        return replace(self, stored=self.stored.index_select(0, rows))

    def join(self, below: Self) -> Self:
        """See QuantisedWeight."""
        return replace(self, stored=torch.cat((self.stored, below.stored)))

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        return replace(self, stored=self.stored.to(device))

    def part(self, start: int, stop: int) -> Self:
        """Return the rows from start to stop, which may lie beyond the last one."""
        return replace(self, stored=self.stored[start:stop])

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        return self.unpack(self.stored).dequantise()
