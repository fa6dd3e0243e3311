"""Weights of float8 (e4m3) numbers; the numbers of a tile share a scale.

    weight = scale * number

A tile is a row (of per-channel and per-tensor checkpoints), or 128 x 128 numbers. The last tiles may be
smaller.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.forms.base import Storage

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# What `quantise` makes: a byte for a number, a float32 for a row.
FLOAT8_ROWS = Storage("float8", 1, 4, form="float8, a scale for each row")
# Rows that are rounded at a time: their float32 copies take a few MiB.
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A QuantisedWeight [N, K].

    Attributes:
        values: [N, K] float8_e4m3fn.
        scales: [ceil(N / height), ceil(K / width)] float32.
        height: rows of a tile.
        width: columns of a tile; K where a scale is for a whole row.
    """

    values: Tensor
    scales: Tensor
    height: int
    width: int

    @property
    def kind(self) -> str:
        """See QuantisedWeight."""
        return "float8"

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.values.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.values.shape
        return rows, columns

    @classmethod
    def blank(cls, shape: tuple[int, int], storage: Storage, device: torch.device) -> Self:
        """Return a weight whose numbers are not set: what decides by which products it is multiplied."""
        (rows, columns), (height, width) = shape, (storage.tile[0], storage.tile[1] or shape[1])
        values = torch.empty(shape, dtype=FLOAT8, device=device)
        sizes = -(-rows // height), -(-columns // width)
        return cls(values, torch.empty(sizes, dtype=torch.float32, device=device), height, width)

    @property
    def kernel_form(self) -> tuple[int, int]:
        """Sizes of a tile, for which kernels are compiled."""
        return self.height, self.width

    @property
    def form(self) -> int:
        """Columns of a tile."""
        return self.width

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order; tiles whose rows come apart are made rows."""
        values = self.values.view(torch.uint8)[rows].view(FLOAT8)
        tiles = rows // self.height
        first = tiles[:: self.height]
        if torch.equal(first.repeat_interleave(self.height)[: len(rows)], tiles):
            return type(self)(values, self.scales[first], self.height, self.width)
        return type(self)(values, self.scales[tiles], 1, self.width)

    def join(self, below: Self) -> Self:
        """Return the rows of this weight above those of another one with tiles of its width."""
        if self.height != below.height or self.shape[0] % self.height:
            return self._in_rows().join(below._in_rows())
        values = torch.cat((self.values.view(torch.uint8), below.values.view(torch.uint8))).view(FLOAT8)
        return type(self)(values, torch.cat((self.scales, below.scales)), self.height, self.width)

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        return type(self)(self.values.to(device), self.scales.to(device), self.height, self.width)

    def part(self, start: int, stop: int) -> Self:
        """Return the rows from start to stop, which may lie beyond the last one."""
        if start % self.height or (stop % self.height and stop < self.shape[0]):
            return self._in_rows().part(start, stop)
        tiles = slice(start // self.height, -(-stop // self.height))
        return type(self)(self.values[start:stop], self.scales[tiles], self.height, self.width)

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        scales = self._in_rows().scales.repeat_interleave(self.width, 1)[:, : self.shape[1]]
        return self.values.float() * scales

    def _in_rows(self) -> Self:
        """Return the weight with scales for each row."""
        scales = self.scales.repeat_interleave(self.height, 0)[: self.shape[0]]
        return type(self)(self.values, scales, 1, self.width)


def quantise(weight: Tensor) -> Float8Weight:
    """Round a weight [N, K] of any float dtype to float8 with a scale for each row."""
    values = torch.empty_like(weight, dtype=FLOAT8)
    scales = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        values[rows], scales[rows] = quantise_rows(weight[rows])
    return Float8Weight(values, scales, 1, weight.shape[1])


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of any float dtype to float8.

    Args:
        x: [T, K].

    Returns:
        Numbers [T, K] float8 and scales [T, 1] float32, at least the smallest normal float32: also a row of
        zeros has one.
    """
    x = x.float()
    scales = x.abs().amax(-1, True).div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8), scales
