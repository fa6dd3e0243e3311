"""A matrix of packed integers of 4 or 8 bits: what it takes in memory, and how its parts become a weight.

weight = scale * (q - zero)        q: unsigned; a group of columns shares scale and zero
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.forms.base import Storage
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.forms.packed import group_of
from octavo.models.formats.integers.words import Groups
from octavo.models.weights import Part, StoredTensors, slice_bounds

_WORD_BITS = 32
_BYTES_OF_AN_INDEX = 8


@dataclass(frozen=True, slots=True)
class PackedMatrix(ABC):
    """A StoredMatrix [N, K]; its format says where integers, scales, zeros and the order of columns are.

    Attributes:
        source: the checkpoint's tensors.
        layer: name of the layer, with its dot.
        groups: of the columns.
        num_rows: N.
        bits: 4 or 8.
        is_symmetric: all zeros are in the middle, so that float16 holds minimums if it holds scales.
    """

    source: StoredTensors
    layer: str
    groups: Groups
    num_rows: int
    bits: int
    is_symmetric: bool
    scales_name: ClassVar[str]

    @property
    @abstractmethod
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""

    @abstractmethod
    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        """Read integers, [rows, columns] uint8, contiguous; order: see BlockWeight."""

    @abstractmethod
    def scales(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        """Read scales, [rows, groups]."""

    @abstractmethod
    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor | int:
        """Read zeros, [rows, groups] uint8, or return the one for all."""

    def order(self, device: torch.device) -> Tensor | None:
        """Read the order of columns; see BlockWeight."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """See StoredMatrix."""
        return self.num_rows, self.groups.size

    @property
    def per_word(self) -> int:
        """Integers in a word."""
        return _WORD_BITS // self.bits

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        bits, groups = self.bits, self.groups
        form = f"{bits} bits in groups of {groups.group}" + (" (act-order)" if groups.is_ordered else "")
        on_gpu = group_of(bits, groups.group)
        if groups.group % BLOCK or on_gpu is None:
            return Storage("odd blocks", 4, form=form)
        order = _BYTES_OF_AN_INDEX / self.num_rows if groups.is_ordered else 0.0
        scale_type = self.source.type_name(self.layer + self.scales_name)
        scale_bytes = 2 if self.is_symmetric and scale_type == "F16" else 4
        num_scales = 1 if self.is_symmetric and bits == 8 else 2
        return Storage(
            "blocks",
            bits / 8 + num_scales * scale_bytes / BLOCK + order,
            bytes_on_gpu=bits / 8 + 4 / on_gpu + order,
            form=form,
        )

    def stored(self, part: str, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """Read a part of one of the layer's tensors."""
        return self.source.read_stored(self.layer + part, rows=rows, columns=columns).to(device)

    def read(self, rows: Part, columns: Part, device: torch.device) -> BlockWeight:
        """See StoredMatrix.

        Raises:
            WeightsError: scales are not finite.
        """
        order = self.order(device)
        columns, groups = self.groups.cut(columns)
        rows = slice(*slice_bounds(rows, self.num_rows))
        quants = self.quants(rows, columns, order, device)
        scales = self.scales(rows, groups, device)
        if not bool(scales.isfinite().all()):
            raise WeightsError(f"{self.layer}{self.scales_name} must hold finite numbers")
        scales, zeros = scales.float().contiguous(), self.zeros(rows, groups, device)
        zeros = zeros.float() if isinstance(zeros, Tensor) else scales.new_tensor(float(zeros))
        if self.bits == 8:
            # q - 128 has a sign.
            quants, zeros = quants.bitwise_xor_(128).view(torch.int8), zeros - 128
        mins = scales * -zeros
        if torch.equal(scales.half().float(), scales) and torch.equal(mins.half().float(), mins):
            scales, mins = scales.half(), mins.half()
        return BlockWeight(self.bits, quants, scales, mins if bool(mins.any()) else None, order)
