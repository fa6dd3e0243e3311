"""A projection of all experts of a layer, packed in groups of 4 or 8 bits as in linear.grouped.weight."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.forms.packed import GroupedWeight


@dataclass(frozen=True, slots=True)
class PackedExpertWeight:
    """Weights [E, N, K]; G = groups of K columns, rounded up to whole spans.

    Attributes:
        bits: 4 or 8.
        size: K.
        group: columns of a group, 16 to 256.
        words: [E, N, spans * 32] int32, contiguous.
        pairs: [E, G, N] int32, contiguous: a scale and a minimum.
        factors: [E, P] float32, contiguous: of the scales and minimums of an expert's P equal parts of rows.
        order: [E, K] int32, contiguous, the column of x that each column meets; None: the same.
    """

    bits: int
    size: int
    group: int
    words: Tensor
    pairs: Tensor
    factors: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        number, rows, _ = self.words.shape
        return number, rows, self.size

    @property
    def form(self) -> Hashable:
        """What decides, beside sizes, which kernels multiply it."""
        return self.bits, self.group, self.order is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32, columns as they are stored: the specification of kernels."""
        parts = self.words.shape[1] // self.factors.shape[1]
        weights = [
            GroupedWeight(self.bits, self.size, self.group, words, pairs, 1.0, None, words[:0]).dequantise()
            for words, pairs in zip(self.words, self.pairs, strict=True)
        ]
        return torch.stack(weights) * self.factors.repeat_interleave(parts, 1)[..., None]
