"""Checkpoints of compressed-tensors in its format pack-quantized.

    X.weight_packed        [N, K / 8] int32        bits 4 i of a word are column 8 c + i; q + 8, unsigned
    X.weight_scale         [N, K / group]          weight = scale * (q - zero)
    X.weight_zero_point    [N / 8, K / group]      bits 4 i of a word are row 8 r + i; zero + 8; missing: 0
    X.weight_shape         [2]                     N, K
    X.weight_g_idx         [K]                     each column's group; missing: in order

With 8 bits a word holds 4 numbers, and 128 takes the place of 8.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.models.formats.integers.packed_matrix import (
    WORD,
    PackedMatrix,
    check_words,
    groups_of,
    num_groups,
    order_of,
    unpack,
    unpack_columns,
    words_of,
)
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import FLOATS, check_tensor
from octavo.models.weights import StoredTensors

_INTEGERS = frozenset({WORD, "I64"})
_SUFFIX = "weight_packed"


@dataclass(frozen=True, slots=True)
class PackQuantizedScheme(MatrixScheme):
    """A Scheme of packed columns.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; -1: all.
        is_symmetric: there are no zeros.
        is_ordered: columns may be in any group.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    is_ordered: bool

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{_SUFFIX}")

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        layer, names = name.removesuffix(_SUFFIX), tensors.names()
        if not {f"{layer}weight_shape", f"{layer}weight_scale"} <= names:
            return False
        if tensors.shape(f"{layer}weight_shape") != (2,) or not tensors.shape(f"{layer}weight_scale"):
            return False
        columns = tensors.read_stored(f"{layer}weight_shape").tolist()[-1]
        groups = num_groups(columns, self.group_size)
        return (
            tensors.shape(name)[-1] == -(-columns * self.bits // 32)
            and tensors.shape(f"{layer}weight_scale")[-1] == groups
            and (f"{layer}weight_zero_point" in names) != self.is_symmetric
            and (f"{layer}weight_g_idx" in names) == self.is_ordered
        )

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        layer, per_word = name.removesuffix(_SUFFIX), 32 // self.bits
        num_rows, num_words = check_words(tensors, name)
        check_tensor(tensors, f"{layer}weight_shape", name, (2,), _INTEGERS)
        shape = tensors.read_stored(f"{layer}weight_shape").tolist()
        if shape[0] != num_rows or -(-shape[1] // per_word) != num_words:
            raise WeightsError(f"{name} is {[num_rows, num_words]} words, but weight_shape says {shape}")
        groups = groups_of(name, shape[1], self.group_size, is_ordered=self.is_ordered)
        check_tensor(tensors, f"{layer}weight_scale", name, (num_rows, groups.number), FLOATS)
        if not self.is_symmetric:
            words = -(-num_rows // per_word)
            check_tensor(tensors, f"{layer}weight_zero_point", name, (words, groups.number), {WORD})
        if self.is_ordered:
            check_tensor(tensors, f"{layer}weight_g_idx", name, (groups.size,), _INTEGERS)
        return _Matrix(tensors, layer, groups, num_rows, self.bits, self.is_symmetric)


@dataclass(frozen=True, slots=True)
class _Matrix(PackedMatrix):
    """See above."""

    @property
    def tensors(self) -> Set[str]:
        parts = [_SUFFIX, "weight_scale", "weight_shape"]
        parts += [] if self.is_symmetric else ["weight_zero_point"]
        parts += ["weight_g_idx"] if self.groups.is_ordered else []
        return {self.layer + part for part in parts}

    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        words, places = words_of(columns, self.per_word)
        return unpack_columns(self.stored(_SUFFIX, rows, words, device), places, self.bits, order)

    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor | int:
        if self.is_symmetric:
            return 1 << self.bits - 1
        words, places = words_of(rows, self.per_word)
        return unpack(self.stored("weight_zero_point", words, groups, device).T, self.bits)[:, places].T

    def order(self, device: torch.device) -> Tensor | None:
        if not self.groups.is_ordered:
            return None
        name = f"{self.layer}weight_g_idx"
        return order_of(self.source.read_stored(name).to(device), self.groups, name)
