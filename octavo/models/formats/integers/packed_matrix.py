"""A matrix of packed integers of 4 or 8 bits: what it takes in memory, and how its parts become a weight.

weight = scale * (q - zero)        q: unsigned; a group of columns shares scale and zero
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedModelError, WeightsError
from octavo.forms.base import Storage
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.forms.packed import packed_group
from octavo.models.formats.quantised_tensors import matrix_shape
from octavo.models.weights import Part, StoredTensors, slice_bounds

WORD = "I32"
# Numbers unpacked at a time, and fewest rows: those of a chunk share words, or are read by whole lines.
_CHUNK = 2**21
_FEWEST_ROWS = 64

# Rows -> their numbers.
Unpacked = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class Groups:
    """How columns share scales.

    Attributes:
        name: of the matrix, for messages.
        size: K.
        group: columns that share a scale; divides K.
        is_ordered: groups may hold columns from anywhere.
    """

    name: str
    size: int
    group: int
    is_ordered: bool = False

    @property
    def number(self) -> int:
        """Groups of a row."""
        return self.size // self.group

    def cut(self, columns: Part) -> tuple[slice, slice]:
        """Return some columns, and their groups.

        Raises:
            ConfigError: the columns cut a group, or groups hold columns from anywhere.
        """
        first, last = slice_bounds(columns, self.size)
        is_whole = (first, last) == (0, self.size)
        if self.is_ordered and not is_whole:
            raise ConfigError(
                f"{self.name} has its columns in an order of their own (act-order, g_idx), so it cannot be "
                "cut into columns; use one rank"
            )
        # Parts of a single group share its scale, and are multiplied in blocks if it is.
        step = self.group if self.number > 1 else BLOCK if self.group % BLOCK == 0 else 1
        if not is_whole and (first % step or last % step):
            raise ConfigError(
                f"{self.name} can only be cut between groups of {step} columns, not into columns "
                f"{first} to {last} of {self.size}; use fewer ranks"
            )
        if self.number == 1:
            return slice(first, last), slice(0, 1)
        return slice(first, last), slice(first // self.group, -(-last // self.group))


def num_groups(size: int, group_size: int) -> int:
    """Return the whole groups of K columns; group_size -1: one for all columns."""
    return 1 if group_size == -1 else size // group_size


def groups_of(name: str, size: int, group_size: int, *, is_ordered: bool = False) -> Groups:
    """Return the groups of a matrix of K columns; group_size -1: one for all columns.

    Raises:
        WeightsError: the group size does not divide K.
    """
    group = size if group_size == -1 else group_size
    if size < 1 or size % group:
        raise WeightsError(f"{name} has {size} columns, which groups of {group} do not divide")
    return Groups(name, size, group, is_ordered)


def words_of(part: slice, per_word: int) -> tuple[slice, slice]:
    """Return the words that hold some numbers, and where these are among all that the words hold.

    Args:
        part: the numbers, with bounds.
        per_word: numbers in a word.
    """
    first = part.start // per_word
    start = part.start - first * per_word
    return slice(first, -(-part.stop // per_word)), slice(start, start + part.stop - part.start)


def unpack_rows(num_rows: int, num_columns: int, device: torch.device, unpacked: Unpacked) -> Tensor:
    """Unpack a matrix some rows at a time, so that no other copy of it is ever in memory.

    Args:
        num_rows: N.
        num_columns: K.
        device: of the matrix.
        unpacked: returns rows [n, K] uint8 of any layout.

    Returns:
        [N, K] uint8.
    """
    out = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=device)
    step = max(_FEWEST_ROWS, _CHUNK // max(1, num_columns))
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        out[part] = unpacked(part)
    return out


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack [R, C] int32 to [R, C * 32 / bits] uint8: the lowest bits of a word come first."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    # A byte becomes two, its low half the first of them.
    spread = packed.to(torch.int16)
    return spread.bitwise_or_(spread << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def unpack_columns(words: Tensor, places: slice, bits: int, order: Tensor | None) -> Tensor:
    """Unpack rows of words, some rows at a time.

    Args:
        words: [N, C] int32, any strides.
        places: of the columns among all that the words hold.
        bits: of an integer.
        order: of all columns; None: as they are.

    Returns:
        [N, K] uint8.
    """

    def unpacked(rows: slice) -> Tensor:
        numbers = unpack(words[rows], bits)
        return numbers[:, places] if order is None else numbers.index_select(1, order)

    return unpack_rows(len(words), places.stop - places.start, words.device, unpacked)


def order_of(indices: Tensor, groups: Groups, name: str) -> Tensor | None:
    """Return the order that sorts columns by their groups, None if they are sorted.

    Args:
        indices: [K], each column's group.
        groups: of the columns.
        name: of the indices, for messages.

    Raises:
        WeightsError: an index is out of range, or groups are of different sizes.
    """
    if bool(((indices < 0) | (indices >= groups.number)).any()):
        raise WeightsError(f"{name} must hold groups in [0, {groups.number}), got {_extremes(indices)}")
    counts = indices.long().bincount(minlength=groups.number)
    if bool((counts != groups.group).any()):
        raise WeightsError(f"{name} must name each group {groups.group} times, got {_extremes(counts)} times")
    order = indices.argsort(stable=True)
    return None if torch.equal(order, torch.arange(groups.size, device=order.device)) else order


def _extremes(values: Tensor) -> str:
    return f"{values.min().item()} to {values.max().item()}"


def check_words(tensors: StoredTensors, name: str) -> tuple[int, int]:
    """Return the shape of a matrix of words.

    Raises:
        WeightsError: it is not a matrix.
        UnsupportedModelError: it is of another type than int32.
    """
    shape, kind = matrix_shape(tensors, name), tensors.type_name(name)
    if kind != WORD:
        raise UnsupportedModelError(f"{name} has the type {kind}; expected {WORD}")
    return shape


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
    scales_name: ClassVar[str] = "weight_scale"

    @property
    @abstractmethod
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""

    @abstractmethod
    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        """Read integers, [rows, columns] uint8, contiguous; order: see BlockWeight."""

    def scales(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        """Read scales, [rows, groups]."""
        return self.stored(self.scales_name, rows, groups, device)

    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor | int:
        """Read zeros, [rows, groups] uint8, or return the one for all; by default the middle."""
        return 1 << self.bits - 1

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
        on_gpu = packed_group(bits, groups.group)
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
            bits=bits,
            tile=(1, groups.group),
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
