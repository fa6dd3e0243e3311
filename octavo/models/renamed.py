"""Views of a checkpoint whose tensors have other names than ours, or contain several of ours."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.forms.base import QuantisedWeight, Storage
from octavo.models.weights import (
    CPU,
    Part,
    QuantisedSource,
    StoredTensors,
    WeightSource,
    missing_tensor,
    slice_bounds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is stored: by itself, or as rows of a stored one.

    Attributes:
        name: of the stored tensor.
        shape: of the tensor.
        first: its first row in the stored one; None: it has all rows.
    """

    name: str
    shape: tuple[int, ...]
    first: int | None = None

    def rows(self, part: Part) -> Part:
        """Return the stored rows that hold a part of the tensor's."""
        if self.first is None:
            return part
        start, stop = slice_bounds(part, self.shape[0])
        return slice(self.first + start, self.first + stop)

    def read(self, read: Callable[..., Tensor], rows: Part, columns: Part) -> Tensor:
        """Read the tensor or a part of it, given a method that reads stored ones; see WeightSource.read."""
        return read(self.name, rows=self.rows(rows), columns=columns)


def by_name(places: Iterable[tuple[str, Place]]) -> dict[str, Place]:
    """Return places by the names of their tensors.

    Raises:
        WeightsError: a tensor has two places.
    """
    found: dict[str, Place] = {}
    for name, place in places:
        if name in found:
            stored = " and in ".join(sorted((found[name].name, place.name)))
            raise WeightsError(f"the checkpoint has {name} twice, in {stored}")
        found[name] = place
    return found


def renamed(weights: WeightSource, places: Mapping[str, Place]) -> WeightSource:
    """Return a source that hands out tensors by the names of their places."""
    if _are_own(weights, places):
        return weights
    return (_Matrices if isinstance(weights, QuantisedSource) else _Weights)(weights, places)


def renamed_tensors(tensors: StoredTensors, places: Mapping[str, Place]) -> StoredTensors:
    """Return the tensors of a checkpoint by the names of their places."""
    return tensors if _are_own(tensors, places) else _Tensors(tensors, places)


def _are_own(weights: WeightSource, places: Mapping[str, Place]) -> bool:
    is_all = places.keys() == weights.names()
    return is_all and all(here == place.name for here, place in places.items())


class _Weights:
    """A WeightSource over another one."""

    def __init__(self, weights: WeightSource, places: Mapping[str, Place]) -> None:
        self._weights = weights
        self._places = places

    def names(self) -> Set[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def read(self, name: str, *, rows: Part = None, columns: Part = None, dtype: torch.dtype) -> Tensor:
        return self._place(name).read(partial(self._weights.read, dtype=dtype), rows, columns)

    def close(self) -> None:
        self._weights.close()

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise missing_tensor("the checkpoint", name, self._places)
        return self._places[name]


class _Tensors(_Weights):
    """A StoredTensors over another one."""

    def __init__(self, tensors: StoredTensors, places: Mapping[str, Place]) -> None:
        super().__init__(tensors, places)
        self._tensors = tensors

    def type_name(self, name: str) -> str:
        return self._tensors.type_name(self._place(name).name)

    def read_stored(self, name: str, *, rows: Part = None, columns: Part = None) -> Tensor:
        return self._place(name).read(self._tensors.read_stored, rows, columns)


class _Matrices(_Weights):
    """A QuantisedSource over another one: quantised matrices are whole, or rows of a stored one."""

    def __init__(self, weights: WeightSource, places: Mapping[str, Place]) -> None:
        super().__init__(weights, places)
        assert isinstance(weights, QuantisedSource), "a source without quantised matrices"
        self._quantised = weights

    def storage(self) -> Mapping[str, Storage]:
        stored = self._quantised.storage()
        return {here: stored[place.name] for here, place in self._places.items() if place.name in stored}

    def read_quantised(
        self, name: str, *, rows: Part = None, columns: Part = None, device: torch.device = CPU
    ) -> QuantisedWeight:
        place = self._place(name)
        rows = place.rows(rows)
        return self._quantised.read_quantised(place.name, rows=rows, columns=columns, device=device)
