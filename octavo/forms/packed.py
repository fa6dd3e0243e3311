"""Weights in blocks, packed in the order of a GPU's kernels: groups of columns share a scale and a minimum.

    weight = scale * q + min        q: 4 bits unsigned, or 8 bits signed

32 words of 32 bits of a row are a span. Bits 4 i to 4 i + 3 of its word j (8 i to 8 i + 7 where q has 8 bits)
hold column 32 i + j: the same bits of all 32 words are 32 neighbours, a plane.

    span       256 columns (4 bits), 128 columns (8 bits)
    plane i    columns 32 i ... 32 i + 31 of a span
    group      whole planes, or half of one

A thread loads 16 bytes, four words; each plane of them meets four neighbours of a row of x. Scale and minimum
are two float16 in one word, times a power of two that brings the weights into float16's range.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from math import frexp, gcd
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.forms.base import Storage
from octavo.forms.blocks import BlockWeight

PLANE = 32
_WORD_BITS = 32
_HALF_PLANE = 16
# Weights without the factor are below 2^15, half of what float16 holds.
_EXPONENT = 15
# Rows of the weight that programs share, and groups of rows of x that they meet at most.
TILE = 128
MOST_GROUPS = 2
# Values packed at a time.
_CHUNK = 2**21


def span_columns(bits: int) -> int:
    """Return the columns that the words of a span hold."""
    return PLANE * _WORD_BITS // bits


def packed_group(bits: int, group: int) -> int | None:
    """Return the columns of a group when packed, or None if groups of a checkpoint cannot be."""
    found = gcd(group, span_columns(bits))
    return found if found >= (_HALF_PLANE if bits == 8 else PLANE) else None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K], packed; G = groups of K columns, rounded up to whole spans.

    Attributes:
        bits: 4 or 8.
        size: K.
        group: columns of a group, 16 to 256.
        words: [N, spans * 32] int32.
        pairs: [G, N] int32: a scale in the low half, a minimum in the high one, both float16.
        factor: of all scales and minimums, a power of two.
        order: [K] int64, the column of x that each column meets; None: the same.
        arrivals: int32 zeros, counters of programs that share some rows. So products with one weight must not
            run at the same time.
    """

    bits: int
    size: int
    group: int
    words: Tensor
    pairs: Tensor
    factor: float
    order: Tensor | None
    arrivals: Tensor

    @classmethod
    def pack(cls, weight: BlockWeight) -> Self:
        """Pack a weight, on its own device."""
        bits, (_, size) = weight.bits, weight.shape
        stored = size // weight.scales.shape[1]
        group = packed_group(bits, stored)
        assert group is not None, f"{bits} bits in groups of {stored} cannot be packed"
        mins = torch.zeros_like(weight.scales) if weight.mins is None else weight.mins
        both = torch.stack((weight.scales, mins), dim=2).float()
        # A bound of weights.
        largest = (both.abs().amax((0, 1)) @ both.new_tensor([2.0**bits, 1.0])).item()
        exponent = _EXPONENT - frexp(largest)[1]
        both *= 2.0**exponent
        # Two neighbouring float16 are an int32, the first of them in its low half.
        pairs = both.half().view(torch.int32)[..., 0].repeat_interleave(stored // group, 1)
        num_groups = -(-size // span_columns(bits)) * span_columns(bits) // group
        # A single group is contiguous as it is, but not with the strides that TMA needs.
        pairs = pad(pairs, (0, num_groups - pairs.shape[1])).T.clone(memory_format=torch.contiguous_format)
        words = _words(weight.quants, bits)
        arrivals = words.new_zeros(MOST_GROUPS * -(-words.shape[0] // TILE))
        return cls(bits, size, group, words, pairs, 2.0**-exponent, weight.order, arrivals)

    @classmethod
    def blank(cls, shape: tuple[int, int], storage: Storage, device: torch.device) -> Self:
        """Return a weight whose numbers are not set: what decides by which products it is multiplied."""
        rows, size = shape
        group = packed_group(storage.bits, storage.tile[1])
        assert group is not None, f"{storage.form} cannot be packed"
        num_spans = -(-size // span_columns(storage.bits))
        words = torch.empty(rows, num_spans * PLANE, dtype=torch.int32, device=device)
        pairs = words.new_empty(num_spans * span_columns(storage.bits) // group, rows)
        return cls(storage.bits, size, group, words, pairs, 1.0, None, words[:0, 0])

    @property
    def kind(self) -> str:
        """See LayerWeight."""
        return "packed"

    @property
    def device(self) -> torch.device:
        """See LayerWeight."""
        return self.words.device

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0], self.size

    @property
    def kernel_form(self) -> Hashable:
        """What kernels are compiled for, beside the dtype of x."""
        return self.bits, self.group, self.shape, self.order is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but the counters."""
        return self.words.nbytes + self.pairs.nbytes + (0 if self.order is None else self.order.nbytes)

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32, columns as they are stored: the specification of kernels."""
        num_rows = self.words.shape[0]
        shifts = torch.arange(0, _WORD_BITS, self.bits, device=self.words.device, dtype=torch.int32)
        planes = self.words.view(num_rows, -1, 1, PLANE) >> shifts[:, None] & (1 << self.bits) - 1
        if self.bits == 8:
            planes = planes.to(torch.uint8).view(torch.int8)
        quants = planes.reshape(num_rows, -1, self.group).float()
        # A single group is contiguous either way, but not with the strides that a view as float16 needs.
        pairs = self.pairs.T.clone(memory_format=torch.contiguous_format)
        both = pairs.view(torch.float16).view(num_rows, -1, 1, 2).float() * self.factor
        return (quants * both[..., 0] + both[..., 1]).view(num_rows, -1)[:, : self.size]


def _words(quants: Tensor, bits: int) -> Tensor:
    """[N, K] bytes to [N, spans * 32] int32, some rows at a time."""
    span = span_columns(bits)
    num_rows, size = quants.shape
    padding = -size % span
    out = torch.empty(num_rows, (size + padding) // span * PLANE, dtype=torch.int32, device=quants.device)
    step = max(1, _CHUNK // (size + padding))
    for start in range(0, num_rows, step):
        part = pad(quants[start : start + step].view(torch.uint8), (0, padding))
        planes = part.view(len(part), -1, span // PLANE, PLANE)
        words = out[start : start + step].view(len(part), -1, PLANE)
        words.copy_(planes[:, :, 0])
        for index in range(1, span // PLANE):
            words |= planes[:, :, index].int() << bits * index
    return out
