"""Packs the experts of a layer for a GPU while they are read, one matrix at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import GroupedWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.models.checkpoint import Checkpoint
from octavo.models.weights import Part


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Those of a PackedExpertWeight; `form` is bits, columns and group of all experts."""

    form: tuple[int, int, int]
    words: Tensor
    pairs: Tensor
    factors: Tensor


class PackedStack:
    """A projection of all experts while it is read: integers of 4 or 8 bits with scales and minimums."""

    def __init__(self, checkpoint: Checkpoint, number: int, num_rows: int, num_parts: int) -> None:
        """Begin with nothing: the first matrix says how all are packed.

        Args:
            checkpoint: where matrices are read from.
            number: of experts.
            num_rows: of an expert.
            num_parts: equal parts of them, each a matrix of its own.
        """
        self._checkpoint = checkpoint
        self._shape = number, num_rows, num_parts
        self._tensors: _Tensors | None = None
        self._order: Tensor | None = None

    def read(self, expert: int, first: int, name: str, *, rows: Part = None, columns: Part = None) -> None:
        """Read a matrix, or a part of it, into an expert's rows from `first` on.

        Raises:
            UnsupportedModelError: it is packed otherwise than the ones before, or gate and up meet the
                columns of x in different orders.
        """
        weight = self._checkpoint.read_quantised(name, rows=rows, columns=columns)
        assert isinstance(weight, BlockWeight), f"{name}: {weight.kind} experts are not packed"
        packed = GroupedWeight.pack(weight)
        tensors = self._tensors_for(name, packed)
        part = first // packed.shape[0]
        self._keep_order(expert, part, name, packed.order, packed.size)
        own = slice(first, first + packed.shape[0])
        tensors.words[expert, own] = packed.words
        tensors.pairs[expert, :, own] = packed.pairs
        tensors.factors[expert, part] = packed.factor

    def weight(self, bias: Tensor | None) -> PackedExpertWeight:
        """Return what was read.

        Raises:
            UnsupportedModelError: there are biases.
        """
        if bias is not None:
            raise UnsupportedModelError(
                'no GPU kernel multiplies experts of 4 or 8 bits that have biases; use quantization="none"'
            )
        assert self._tensors is not None, "no matrix was read"
        tensors = self._tensors
        return PackedExpertWeight(*tensors.form, tensors.words, tensors.pairs, tensors.factors, self._order)

    def _tensors_for(self, name: str, packed: GroupedWeight) -> _Tensors:
        form = packed.bits, packed.size, packed.group
        if self._tensors is None:
            number, num_rows, num_parts = self._shape
            options = {"dtype": torch.int32, "device": packed.words.device}
            self._tensors = _Tensors(
                form,
                torch.empty(number, num_rows, packed.words.shape[1], **options),
                torch.empty(number, packed.pairs.shape[0], num_rows, **options),
                torch.empty(number, num_parts, dtype=torch.float32, device=packed.words.device),
            )
        if form != self._tensors.form:
            raise UnsupportedModelError(
                f"{name} has {packed.bits} bits in groups of {packed.group}, other experts of its layer have "
                f'{self._tensors.form[0]} in groups of {self._tensors.form[2]}; use quantization="none"'
            )
        return self._tensors

    def _keep_order(self, expert: int, part: int, name: str, order: Tensor | None, size: int) -> None:
        """Note the order of an expert's columns; a part after the first must have the same."""
        if order is None and self._order is None:
            return
        device = self._checkpoint.device
        plain = torch.arange(size, dtype=torch.int32, device=device)
        if self._order is None:
            self._order = plain.repeat(self._shape[0], 1)
        found = plain if order is None else order.int()
        if part == 0:
            self._order[expert] = found
        elif not torch.equal(self._order[expert], found):
            raise UnsupportedModelError(
                f"{name} has its columns in another order than the gate of its expert (act-order, g_idx); "
                'use quantization="none"'
            )
