"""Checkpoints of ModelOpt's integers of 4 bits (W4A16_AWQ, W4A8_AWQ): a byte has two rows of a column.

X.weight             [N / 2, K] uint8       row 2 r in the low bits, row 2 r + 1 in the high ones; signed
X.weight_scale       [N, K / group]         weight = scale * q
X.weight_scale_2     [1]                    of weights as float8, for W4A8's own product; not used
X.input_scale        [1]                    of activations; not used
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.formats.integers.packed_matrix import PackedMatrix, groups_of, unpack_rows, words_of
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import FLOATS, check_tensor, matrix_shape
from octavo.models.weights import StoredTensors

_TYPE, _SUFFIX = "U8", "weight"
_BITS = 4
_UNUSED = ("input_scale", "weight_scale_2")


class PairedRowsScheme(MatrixScheme):
    """A Scheme of pairs of rows; how many columns share a scale is seen from the scales."""

    __slots__ = ()

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{_SUFFIX}") and tensors.type_name(name) == _TYPE

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        scale = f"{name}_scale"
        return scale in tensors.names() and tensors.type_name(scale) in FLOATS

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        layer, scale, shape = name.removesuffix(_SUFFIX), f"{name}_scale", matrix_shape(tensors, name)
        found = tensors.shape(scale) if scale in tensors.names() else ()
        num_groups = found[1] if len(found) == 2 and found[1] > 0 and shape[1] % found[1] == 0 else 1
        check_tensor(tensors, scale, name, (2 * shape[0], num_groups), FLOATS)
        for each in {layer + part for part in _UNUSED} & tensors.names():
            check_tensor(tensors, each, name, (1,), FLOATS)
        groups = groups_of(name, shape[1], shape[1] // num_groups)
        return _Matrix(tensors, layer, groups, 2 * shape[0], _BITS, is_symmetric=True)


@dataclass(frozen=True, slots=True)
class _Matrix(PackedMatrix):
    """See above."""

    @property
    def tensors(self) -> Set[str]:
        unused = {self.layer + part for part in _UNUSED} & self.source.names()
        return {self.layer + _SUFFIX, self.layer + self.scales_name} | unused

    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        pairs, places = words_of(rows, 2)
        stored = self.stored(_SUFFIX, pairs, columns, device)

        def unpacked(part: slice) -> Tensor:
            own, inner = words_of(slice(places.start + part.start, places.start + part.stop), 2)
            both = torch.stack((stored[own] & 15, stored[own] >> 4), 1)
            return both.flatten(0, 1)[inner] ^ 1 << _BITS - 1

        return unpack_rows(rows.stop - rows.start, stored.shape[1], device, unpacked)
