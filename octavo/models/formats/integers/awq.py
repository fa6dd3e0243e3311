"""Checkpoints of AutoAWQ in its gemm layout.

X.qweight    [K, N / 8] int32      bits 4 i of a word are column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
X.qzeros     [K / group, N / 8]    likewise
X.scales     [K / group, N]        weight = scale * (q - zero)
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats.integers.packed_matrix import (
    WORD,
    PackedMatrix,
    check_words,
    groups_of,
    unpack_rows,
    words_of,
)
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import FLOATS, check_tensor
from octavo.models.formats.scheme_fields import CALIBRATION, check_patterns, read_group_size
from octavo.models.weights import StoredTensors

_SUFFIX = "qweight"
_BITS = 4
_PER_WORD = 8
# Place of column i within its word, which has 8.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_KEYS = CALIBRATION | words(
    "bits desc_act do_fuse format fuse_max_seq_len group_size method modules_to_fuse",
    "modules_to_not_convert pre_quantized quant_method sym version zero_point",
)


def read_awq(fields: ConfigFields) -> "AWQScheme":
    """Read quant_method "awq"; see schemes.read_scheme."""
    fields.require_known(_KEYS)
    fields.require_one_of("bits", (_BITS,))
    for name in ("format", "version"):
        fields.require_one_of(name, ("gemm", "GEMM", None))
    fields.require_one_of("desc_act", (False, None))
    # It is False where all zeros are alike, which are stored none the less.
    fields.require_one_of("zero_point", (True, False, None))
    fields.require_one_of("method", ("awq", None))
    fields.require_one_of("data_type", ("int", None))
    check_patterns(fields, "modules_to_not_convert")
    return AWQScheme(read_group_size(fields))


@dataclass(frozen=True, slots=True)
class AWQScheme(MatrixScheme):
    """A Scheme of packed columns.

    Attributes:
        group_size: columns that share a scale; -1: all.
    """

    group_size: int

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{_SUFFIX}")

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        layer = name.removesuffix(_SUFFIX)
        size, num_words = check_words(tensors, name)
        groups = groups_of(name, size, self.group_size)
        check_tensor(tensors, f"{layer}qzeros", name, (groups.number, num_words), {WORD})
        check_tensor(tensors, f"{layer}scales", name, (groups.number, num_words * _PER_WORD), FLOATS)
        return _Matrix(tensors, layer, groups, num_words * _PER_WORD, _BITS, is_symmetric=False)


@dataclass(frozen=True, slots=True)
class _Matrix(PackedMatrix):
    """See above; all tensors have rows of the weight as columns."""

    scales_name: ClassVar[str] = "scales"

    @property
    def tensors(self) -> Set[str]:
        return {f"{self.layer}{part}" for part in (_SUFFIX, "qzeros", "scales")}

    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        return self._unpacked(_SUFFIX, columns, rows, device)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        return self.stored("scales", groups, rows, device).T

    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        return self._unpacked("qzeros", groups, rows, device)

    def _unpacked(self, name: str, columns: slice, rows: slice, device: torch.device) -> Tensor:
        """Read what is stored by columns, [rows, columns] uint8."""
        words, places = words_of(rows, _PER_WORD)
        stored = self.stored(name, columns, words, device)

        def unpacked(part: slice) -> Tensor:
            own, inner = words_of(slice(places.start + part.start, places.start + part.stop), _PER_WORD)
            down = stored[:, own].T.contiguous()
            numbers = torch.empty(len(down), _PER_WORD, len(stored), dtype=torch.uint8, device=device)
            for row, place in enumerate(_PLACES):
                numbers[:, row] = down >> _BITS * place & 15
            return numbers.view(-1, len(stored))[inner]

        return unpack_rows(rows.stop - rows.start, len(stored), device, unpacked)
