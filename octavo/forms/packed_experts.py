"""A projection of all experts of a layer in blocks, packed for a GPU's kernels as in forms.packed."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.base import StackShape, Storage
from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import PackedWeight


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

    @classmethod
    def like(cls, one: PackedWeight, shape: StackShape) -> Self:
        """Return weights whose numbers are not set, each packed like one of their matrices."""
        sizes = shape.number, shape.rows
        words = torch.empty(*sizes, one.words.shape[1], dtype=torch.int32, device=shape.device)
        pairs = words.new_empty(shape.number, one.pairs.shape[0], shape.rows)
        factors = words.new_empty(shape.number, shape.parts, dtype=torch.float32)
        return cls(one.bits, one.size, one.group, words, pairs, factors)

    @property
    def kind(self) -> str:
        """See ExpertsWeight."""
        return "packed"

    @property
    def device(self) -> torch.device:
        """See ExpertsWeight."""
        return self.words.device

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
            PackedWeight(self.bits, self.size, self.group, words, pairs, 1.0, None, words[:0]).dequantise()
            for words, pairs in zip(self.words, self.pairs, strict=True)
        ]
        return torch.stack(weights) * self.factors.repeat_interleave(parts, 1)[..., None]


class PackedStack:
    """An ExpertStack of integers of 4 or 8 bits with scales and minimums; the first matrix says which."""

    def __init__(self, shape: StackShape) -> None:
        """Begin with nothing."""
        self._shape = shape
        self._stacked: PackedExpertWeight | None = None
        self._order: Tensor | None = None

    @classmethod
    def blank(cls, shape: StackShape, storage: Storage) -> PackedExpertWeight:
        """Return weights whose numbers are not set: what decides by which products they are multiplied."""
        one = PackedWeight.blank((1, shape.columns), storage, shape.device)
        return PackedExpertWeight.like(one, shape)

    def put(self, name: str, expert: int, first: int, weight: BlockWeight) -> None:
        """See ExpertStack.

        Raises:
            UnsupportedModelError: it is packed otherwise than the ones before, or gate and up meet the
                columns of x in different orders.
        """
        assert isinstance(weight, BlockWeight), f"{name}: {weight.kind} experts are not packed"
        packed = PackedWeight.pack(weight)
        if self._stacked is None:
            self._stacked = PackedExpertWeight.like(packed, self._shape)
        stacked = self._stacked
        if (packed.bits, packed.size, packed.group) != (stacked.bits, stacked.size, stacked.group):
            raise UnsupportedModelError(
                f"{name} has {packed.bits} bits in groups of {packed.group}, other experts of its layer have "
                f'{stacked.bits} in groups of {stacked.group}; use quantization="none"'
            )
        part = first // packed.shape[0]
        self._keep_order(expert, part, name, packed.order, packed.size)
        own = slice(first, first + packed.shape[0])
        stacked.words[expert, own] = packed.words
        stacked.pairs[expert, :, own] = packed.pairs
        stacked.factors[expert, part] = packed.factor

    def finish(self, bias: Tensor | None) -> PackedExpertWeight:
        """See ExpertStack.

        Raises:
            UnsupportedModelError: there are biases.
        """
        if bias is not None:
            raise UnsupportedModelError(
                'no GPU kernel multiplies experts of 4 or 8 bits that have biases; use quantization="none"'
            )
        assert self._stacked is not None, "no matrix was read"
        return replace(self._stacked, order=self._order)

    def _keep_order(self, expert: int, part: int, name: str, order: Tensor | None, size: int) -> None:
        """Note the order of an expert's columns; a part after the first must have the same."""
        if order is None and self._order is None:
            return
        plain = torch.arange(size, dtype=torch.int32, device=self._shape.device)
        if self._order is None:
            self._order = plain.repeat(self._shape.number, 1)
        found = plain if order is None else order.int()
        if part == 0:
            self._order[expert] = found
        elif not torch.equal(self._order[expert], found):
            raise UnsupportedModelError(
                f"{name} has its columns in another order than the gate of its expert (act-order, g_idx); "
                'use quantization="none"'
            )
