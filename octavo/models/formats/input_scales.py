"""Scales of a quantised matrix's inputs, which AWQ and SmoothQuant of ModelOpt leave in a checkpoint.

    X.pre_quant_scale    [K]    y = (x * scale) W^T

Those of down_proj go into the rows of up_proj, where both are integers: down(act(gate) * up) is the same.
Others become a part of their matrix, which is dequantised for it: its columns have scales of their own then.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.forms.base import QuantisedWeight, Storage
from octavo.forms.blocks import BlockWeight
from octavo.models.formats.quantised_tensors import FLOATS, StoredMatrix, check_tensor
from octavo.models.weights import Part, StoredTensors, slice_bounds

_SUFFIX = "pre_quant_scale"
_DOWN = "down_proj."


def with_input_scales(
    tensors: StoredTensors, matrices: Mapping[str, StoredMatrix]
) -> dict[str, StoredMatrix]:
    """Return quantised matrices with the scales of their inputs.

    Raises:
        WeightsError: scales are of the wrong shape.
        UnsupportedModelError: they are of another type.
    """
    found = dict(matrices)
    for scale in sorted(name for name in tensors.names() if name.endswith(f".{_SUFFIX}")):
        layer = scale.removesuffix(_SUFFIX)
        matrix = found.get(f"{layer}weight")
        if matrix is None:
            continue
        check_tensor(tensors, scale, f"{layer}weight", matrix.shape[1:], FLOATS)
        before = layer.removesuffix(_DOWN) + "up_proj."
        if layer.endswith(_DOWN) and _can_scale_rows(tensors, found, before, matrix.shape[1]):
            found[f"{before}weight"] = _RowsScaled(found[f"{before}weight"], tensors, scale)
        else:
            found[f"{layer}weight"] = _ColumnsScaled(matrix, tensors, scale)
    return found


def _can_scale_rows(
    tensors: StoredTensors, matrices: Mapping[str, StoredMatrix], layer: str, num_rows: int
) -> bool:
    matrix = matrices.get(f"{layer}weight")
    if matrix is None or f"{layer}bias" in tensors.names():
        return False
    return matrix.shape[0] == num_rows and matrix.storage.kind == "blocks"


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A matrix, and the scales of its rows or columns."""

    matrix: StoredMatrix
    source: StoredTensors
    scale_name: str

    @property
    def shape(self) -> tuple[int, int]:
        """See StoredMatrix."""
        return self.matrix.shape

    @property
    def tensors(self) -> Set[str]:
        """See StoredMatrix."""
        return self.matrix.tensors | {self.scale_name}

    def _scales(self, part: Part, device: torch.device) -> Tensor:
        scales = self.source.read_stored(self.scale_name, rows=part).to(device).float()
        if not bool(scales.isfinite().all()):
            raise WeightsError(f"{self.scale_name} must hold finite numbers")
        return scales


@dataclass(frozen=True, slots=True)
class _RowsScaled(_Scaled):
    """A StoredMatrix in blocks."""

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        return self.matrix.storage

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        """See StoredMatrix."""
        weight = self.matrix.read(rows, columns, device)
        assert isinstance(weight, BlockWeight), f"{self.scale_name}: rows of {weight.kind}"
        scales = self._scales(slice(*slice_bounds(rows, self.shape[0])), device)[:, None]
        mins = None if weight.mins is None else weight.mins.float() * scales
        return BlockWeight(weight.bits, weight.quants, weight.scales.float() * scales, mins, weight.order)


@dataclass(frozen=True, slots=True)
class _ColumnsScaled(_Scaled):
    """A StoredMatrix that no kernel multiplies."""

    @property
    def storage(self) -> Storage:
        """See StoredMatrix."""
        return Storage("odd blocks", 4, form=f"{self.matrix.storage.form}, with scales of its inputs")

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        """See StoredMatrix."""
        scales = self._scales(slice(*slice_bounds(columns, self.shape[1])), device)
        return _Weight(self.matrix.read(rows, columns, device).dequantise() * scales)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A QuantisedWeight that is dequantised, [N, K] float32."""

    values: Tensor
    kind = "odd blocks"
    form = None

    @property
    def shape(self) -> tuple[int, int]:
        """See QuantisedWeight."""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def device(self) -> torch.device:
        """See QuantisedWeight."""
        return self.values.device

    def take(self, rows: Tensor) -> Self:
        """See QuantisedWeight."""
        return type(self)(self.values[rows])

    def join(self, below: Self) -> Self:
        """See QuantisedWeight."""
        return type(self)(torch.cat((self.values, below.values)))

    def to(self, device: torch.device) -> Self:
        """See QuantisedWeight."""
        return type(self)(self.values.to(device))

    def dequantise(self) -> Tensor:
        """See QuantisedWeight."""
        return self.values
