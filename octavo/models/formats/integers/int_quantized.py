"""Checkpoints of compressed-tensors in its format int-quantized, which W8A8 and W4A8 have.

    X.weight               [N, K] I8              signed integers, also of 4 bits
    X.weight_scale         [N, K / group] or [1]  weight = scale * (q - zero); of ModelOpt [N]
    X.weight_zero_point    the same, I8           missing: 0
    X.input_scale, X.input_zero_point             of activations

Scales of activations are not used: if activations are rounded, then by scales of their own rows, which is at
least as exact.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.models.formats.integers.packed_matrix import PackedMatrix, groups_of, num_groups
from octavo.models.formats.matrix_schemes import MatrixScheme
from octavo.models.formats.quantised_tensors import FLOATS, check_tensor, matrix_shape
from octavo.models.weights import StoredTensors

_TYPE = "I8"
_SUFFIX = "weight"
_INPUTS = ("input_scale", "input_zero_point")


@dataclass(frozen=True, slots=True)
class IntQuantizedScheme(MatrixScheme):
    """A Scheme of integers in bytes.

    Attributes:
        bits: 4 or 8.
        group_size: columns that share a scale; -1: all.
        is_symmetric: there are no zeros.
        has_one_scale: all numbers of a matrix share it.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    has_one_scale: bool

    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return name.endswith(f".{_SUFFIX}") and tensors.type_name(name) == _TYPE

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """See MatrixScheme."""
        return (
            f"{name}_scale" in tensors.names()
            and len(tensors.shape(name)) == 2
            and tensors.shape(f"{name}_scale") == self._num_scales(tensors, name)
            and (f"{name}_zero_point" in tensors.names()) != self.is_symmetric
        )

    def _num_scales(self, tensors: StoredTensors, name: str) -> tuple[int, ...]:
        num_rows, size = tensors.shape(name)
        if self.has_one_scale:
            return (1,)
        if self.group_size == -1 and tensors.shape(f"{name}_scale") == (num_rows,):
            return (num_rows,)
        return num_rows, num_groups(size, self.group_size)

    def matrix(self, tensors: StoredTensors, name: str) -> "_Matrix":
        """See MatrixScheme."""
        shape = matrix_shape(tensors, name)
        groups = groups_of(name, shape[1], self.group_size)
        num_scales = self._num_scales(tensors, name)
        check_tensor(tensors, f"{name}_scale", name, num_scales, FLOATS)
        if not self.is_symmetric:
            check_tensor(tensors, f"{name}_zero_point", name, num_scales, {_TYPE})
        return _Matrix(tensors, name.removesuffix(_SUFFIX), groups, shape[0], self.bits, self.is_symmetric)


@dataclass(frozen=True, slots=True)
class _Matrix(PackedMatrix):
    """See above."""

    @property
    def tensors(self) -> Set[str]:
        parts = [_SUFFIX, "weight_scale"] + ([] if self.is_symmetric else ["weight_zero_point"])
        inputs = {self.layer + part for part in _INPUTS} & self.source.names()
        return {self.layer + part for part in parts} | inputs

    def quants(self, rows: slice, columns: slice, order: Tensor | None, device: torch.device) -> Tensor:
        signed = self.stored(_SUFFIX, rows, columns, device).contiguous()
        middle = 1 << self.bits - 1
        if self.bits < 8 and not bool(((signed >= -middle) & (signed < middle)).all()):
            raise WeightsError(f"{self.layer}{_SUFFIX} must hold integers of {self.bits} bits")
        return self._unsigned(signed)

    def _unsigned(self, signed: Tensor) -> Tensor:
        # In 8 bits a sum past 255 is what it should be.
        return signed.view(torch.uint8) + (1 << self.bits - 1) & (1 << self.bits) - 1

    def scales(self, rows: slice, groups: slice, device: torch.device) -> Tensor:
        return self._of_rows("weight_scale", rows, groups, device)

    def zeros(self, rows: slice, groups: slice, device: torch.device) -> Tensor | int:
        if self.is_symmetric:
            return 1 << self.bits - 1
        return self._unsigned(self._of_rows("weight_zero_point", rows, groups, device).contiguous())

    def _of_rows(self, part: str, rows: slice, groups: slice, device: torch.device) -> Tensor:
        name = self.layer + part
        shape = self.source.shape(name)
        if shape == (1,) and self.num_rows > 1:
            return self.source.read_stored(name).to(device).expand(rows.stop - rows.start, 1)
        if len(shape) == 1:
            return self.source.read_stored(name, rows=rows).to(device)[:, None]
        return self.stored(part, rows, groups, device)
