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
from octavo.layers.linear.block_weight import BlockWeight
from octavo.layers.linear.quantised import Storage
from octavo.models.formats.integers import (
    FLOATS,
    WORD,
    Groups,
    check_tensor,
    check_words,
    groups_of,
    make_blocks,
    open_matrices,
    order_of,
    storage_of,
    unpack,
    unpack_rows,
    words_of,
)
from octavo.models.formats.quantised_tensors import QuantisedTensors, StoredTensors
from octavo.models.weights import Part, slice_bounds

_WORD_BITS = 32
_INTEGERS = frozenset({WORD, "I64"})
_SUFFIX = "weight_packed"


@dataclass(frozen=True, slots=True)
class PackQuantizedScheme:
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

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return open_matrices(tensors, _SUFFIX, self._matrix)

    def _matrix(self, tensors: StoredTensors, layer: str) -> "_Matrix":
        name, per_word = layer + _SUFFIX, _WORD_BITS // self.bits
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
        return _Matrix(tensors, layer, groups, num_rows, self)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A StoredMatrix."""

    source: StoredTensors
    layer: str
    groups: Groups
    num_rows: int
    scheme: PackQuantizedScheme

    @property
    def shape(self) -> tuple[int, int]:
        """See StoredMatrix."""
        return self.num_rows, self.groups.size

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        return storage_of(
            self.scheme.bits,
            self.groups,
            self.num_rows,
            is_symmetric=self.scheme.is_symmetric,
            scale_type=self.source.type_name(f"{self.layer}weight_scale"),
        )

    @property
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""
        names = {f"{self.layer}{part}" for part in (_SUFFIX, "weight_scale", "weight_shape")}
        if not self.scheme.is_symmetric:
            names.add(f"{self.layer}weight_zero_point")
        if self.scheme.is_ordered:
            names.add(f"{self.layer}weight_g_idx")
        return names

    def read(self, rows: Part, columns: Part, device: torch.device) -> BlockWeight:
        """See StoredMatrix."""
        bits, per_word = self.scheme.bits, _WORD_BITS // self.scheme.bits
        order = self._order(device)
        columns, groups = self.groups.cut(columns)
        rows = slice(*slice_bounds(rows, self.num_rows))
        words, places = words_of(columns, per_word)
        stored = self.source.read_stored(self.layer + _SUFFIX, rows=rows, columns=words).to(device)

        def unpacked(part: slice) -> Tensor:
            numbers = unpack(stored[part], bits)
            return numbers[:, places] if order is None else numbers.index_select(1, order)

        scales = self.source.read_stored(f"{self.layer}weight_scale", rows=rows, columns=groups).to(device)
        return make_blocks(
            unpack_rows(rows.stop - rows.start, columns.stop - columns.start, device, unpacked),
            scales,
            1 << bits - 1 if self.scheme.is_symmetric else self._zeros(rows, groups, device),
            bits,
            order,
            f"{self.layer}weight_scale",
        )

    def _order(self, device: torch.device) -> Tensor | None:
        if not self.scheme.is_ordered:
            return None
        name = f"{self.layer}weight_g_idx"
        return order_of(self.source.read_stored(name).to(device), self.groups, name)

    def _zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        """Read zeros, [rows, groups] uint8."""
        bits, per_word = self.scheme.bits, _WORD_BITS // self.scheme.bits
        words, places = words_of(rows, per_word)
        stored = self.source.read_stored(f"{self.layer}weight_zero_point", rows=words, columns=groups)
        return unpack(stored.to(device).T, bits)[:, places].T
