"""Schemes that find each quantised matrix by its tensors, and checkpoints that have several of them.

config.json may name the layers of each scheme, by classes and patterns. Which one a matrix has is seen from
its tensors: their types, shapes, and whether there are zeros or indices of groups.

AWQ and SmoothQuant of ModelOpt leave scales of a quantised matrix's inputs in a checkpoint:

    X.pre_quant_scale    [K]    y = (x * scale) W^T

Those of down_proj go into the rows of up_proj, where both are integers: down(act(gate) * up) is the same.
Others become a part of their matrix, which is dequantised for it: its columns have scales of their own then.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.forms.base import QuantisedWeight, Storage
from octavo.forms.blocks import BlockWeight
from octavo.models.experts.names import with_stored_expert_names
from octavo.models.formats.quantised_tensors import (
    FLOATS,
    QuantisedTensors,
    StoredMatrix,
    check_tensor,
    check_the_rest,
)
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
        return self.matrix.shape

    @property
    def tensors(self) -> Set[str]:
        return self.matrix.tensors | {self.scale_name}

    def _scales(self, part: Part, device: torch.device) -> Tensor:
        scales = self.source.read_stored(self.scale_name, rows=part).to(device).float()
        if not bool(scales.isfinite().all()):
            raise WeightsError(f"{self.scale_name} must hold finite numbers")
        return scales


@dataclass(frozen=True, slots=True)
class _RowsScaled(_Scaled):
    """A StoredMatrix in blocks, with the scales of its rows."""

    @property
    def storage(self) -> Storage:
        return self.matrix.storage

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        weight = self.matrix.read(rows, columns, device)
        assert isinstance(weight, BlockWeight), f"{self.scale_name}: rows of {weight.kind}"
        scales = self._scales(slice(*slice_bounds(rows, self.shape[0])), device)[:, None]
        mins = None if weight.mins is None else weight.mins.float() * scales
        return BlockWeight(weight.bits, weight.quants, weight.scales.float() * scales, mins, weight.order)


@dataclass(frozen=True, slots=True)
class _ColumnsScaled(_Scaled):
    """A StoredMatrix that no kernel multiplies, because each column has a scale."""

    @property
    def storage(self) -> Storage:
        return Storage("odd blocks", 4, form=f"{self.matrix.storage.form}, with scales of its inputs")

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
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
        rows, columns = self.values.shape
        return rows, columns

    @property
    def device(self) -> torch.device:
        return self.values.device

    def take(self, rows: Tensor) -> Self:
        return type(self)(self.values[rows])

    def join(self, below: Self) -> Self:
        return type(self)(torch.cat((self.values, below.values)))

    def to(self, device: torch.device) -> Self:
        return type(self)(self.values.to(device))

    def dequantise(self) -> Tensor:
        return self.values


# Names that some tools give the cache's scales, beside the projection, and ours.
_CACHE_SCALES = {"k_proj.k_scale": "k_scale", "v_proj.v_scale": "v_scale"}


class MatrixScheme(ABC):
    """A Scheme that finds each matrix by the tensor that holds its numbers."""

    __slots__ = ()

    @property
    def tile_rows(self) -> int:
        """Rows that share a scale, where scales are for tiles; else 1."""
        return 1

    @abstractmethod
    def stores(self, tensors: StoredTensors, name: str) -> bool:
        """Return whether a tensor holds a matrix's numbers."""

    def fits(self, tensors: StoredTensors, name: str) -> bool:
        """Return whether a matrix, whose numbers a tensor holds, has the other tensors of this scheme.

        Asked only where there are several schemes.
        """
        return True

    @abstractmethod
    def matrix(self, tensors: StoredTensors, name: str) -> StoredMatrix:
        """Return the matrix whose numbers a tensor holds.

        Raises:
            WeightsError: other tensors are missing or of the wrong shape.
            UnsupportedModelError: a tensor's type is not supported.
        """

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return _open(tensors, [self])


@dataclass(frozen=True, slots=True)
class MixedScheme:
    """A Scheme of several; a matrix has the first one that fits. With none, only the cache has scales."""

    schemes: Sequence[MatrixScheme]

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """See Scheme."""
        return _open(tensors, self.schemes)


def _open(tensors: StoredTensors, schemes: Sequence[MatrixScheme]) -> QuantisedTensors:
    """Return a checkpoint's tensors, quantised matrices as matrices.

    Raises:
        WeightsError: a matrix lacks a tensor, or has one of a wrong shape.
        UnsupportedModelError: a tensor's type is not supported, or belongs to no matrix.
    """
    tensors = with_stored_expert_names(tensors, max((scheme.tile_rows for scheme in schemes), default=1))
    matrices: dict[str, StoredMatrix] = {}
    for name in sorted(tensors.names()):
        own = [scheme for scheme in schemes if scheme.stores(tensors, name)]
        if own:
            # If the matrix fits none, the last scheme says what is wrong.
            fitting = (scheme for scheme in own[:-1] if scheme.fits(tensors, name))
            matrices[f"{name.rpartition('.')[0]}.weight"] = next(fitting, own[-1]).matrix(tensors, name)
    matrices = with_input_scales(tensors, matrices)
    check_the_rest(tensors, set().union(*(matrix.tensors for matrix in matrices.values())))
    renamed = {
        name.removesuffix(theirs) + ours: name
        for name in tensors.names()
        for theirs, ours in _CACHE_SCALES.items()
        if name.endswith(f".{theirs}")
    }
    return QuantisedTensors(tensors, matrices, renamed)
