"""Checkpoints that store some matrices quantised, in several tensors each."""

from collections.abc import Mapping, Set
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.forms.base import QuantisedWeight, Storage
from octavo.models.weights import CPU, Part, StoredTensors

# Types of tensors that are not quantised, as safetensors calls them.
FLOATS = frozenset({"F16", "BF16", "F32"})


class StoredMatrix(Protocol):
    """One matrix [N, K] of a format."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def storage(self) -> Storage:
        """What it takes in memory."""
        ...

    @property
    def tensors(self) -> Set[str]:
        """Names of the tensors that it is stored in."""
        ...

    def read(self, rows: Part, columns: Part, device: torch.device) -> QuantisedWeight:
        """Read it, or a part of it, to a device; see QuantisedSource.read_quantised."""
        ...


class QuantisedTensors:
    """A WeightSource and QuantisedSource of both kinds of tensors: quantised matrices, and others."""

    def __init__(
        self,
        tensors: StoredTensors,
        matrices: Mapping[str, StoredMatrix],
        renamed: Mapping[str, str],
    ) -> None:
        """Wrap a checkpoint.

        Args:
            tensors: the checkpoint; closed by `close`.
            matrices: those that are quantised, by the name of the weight.
            renamed: other tensors that have a name of their own in this format: our name -> theirs.

        Raises:
            WeightsError: a tensor is there twice.
        """
        self._tensors = tensors
        self._matrices = dict(matrices)
        self._renamed = dict(renamed)
        used = set(self._renamed.values()).union(*(matrix.tensors for matrix in matrices.values()))
        others = tensors.names() - used
        for name in sorted(others & (matrices.keys() | renamed.keys())):
            stored = sorted(matrices[name].tensors) if name in matrices else [renamed[name]]
            raise WeightsError(f"the checkpoint has {name} twice, the other one in {', '.join(stored)}")
        self._names = others | matrices.keys() | renamed.keys()

    def names(self) -> Set[str]:
        """See WeightSource."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        matrix = self._matrices.get(name)
        return self._tensors.shape(self._renamed.get(name, name)) if matrix is None else matrix.shape

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        """See WeightSource; a quantised matrix is dequantised."""
        matrix = self._matrices.get(name)
        if matrix is None:
            name = self._renamed.get(name, name)
            return self._tensors.read(name, rows=rows, columns=columns, dtype=dtype)
        return matrix.read(rows, columns, CPU).dequantise().to(dtype)

    def storage(self) -> Mapping[str, Storage]:
        """See QuantisedSource."""
        return {name: matrix.storage for name, matrix in self._matrices.items()}

    def read_quantised(
        self, name: str, *, rows: Part = None, columns: Part = None, device: torch.device = CPU
    ) -> QuantisedWeight:
        """See QuantisedSource."""
        return self._matrices[name].read(rows, columns, device)

    def close(self) -> None:
        """See WeightSource."""
        self._tensors.close()


def matrix_shape(tensors: StoredTensors, name: str) -> tuple[int, int]:
    """Return the shape of a matrix.

    Raises:
        WeightsError: the tensor has not two dimensions.
    """
    shape = tensors.shape(name)
    if len(shape) != 2:
        raise WeightsError(f"{name} is {list(shape)}, expected 2 dimensions")
    return shape[0], shape[1]


def check_tensor(
    tensors: StoredTensors, name: str, belongs_to: str, shape: tuple[int, ...], types: Set[str]
) -> None:
    """Check a tensor's presence, shape and type.

    Raises:
        WeightsError: it is missing, or of another shape.
        UnsupportedModelError: it is of another type.
    """
    if name not in tensors.names():
        raise WeightsError(f"the checkpoint lacks {name}, which belongs to {belongs_to}")
    found, kind = tensors.shape(name), tensors.type_name(name)
    if found != shape:
        raise WeightsError(f"{name} is {list(found)}, expected {list(shape)}")
    if kind not in types:
        raise UnsupportedModelError(f"{name} has the type {kind}; expected {', '.join(sorted(types))}")


def check_the_rest(tensors: StoredTensors, used: Set[str]) -> None:
    """Refuse tensors of types that only quantised matrices have, but that belong to none.

    Raises:
        UnsupportedModelError: there is one.
    """
    for name in sorted(tensors.names() - used):
        if tensors.type_name(name) not in FLOATS:
            raise UnsupportedModelError(
                f"{name} has the type {tensors.type_name(name)} and belongs to no quantised matrix; expected "
                f"{', '.join(sorted(FLOATS))}"
            )
