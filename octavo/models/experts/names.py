"""Checkpoints' layouts of experts, as one: a matrix for each expert and projection.

    here, Qwen, OLMoE   mlp.gate.weight (router), mlp.experts.3.gate_proj.weight, .up_proj, .down_proj
    Mixtral             block_sparse_moe.gate.weight, .experts.3.w1.weight, .w3, .w2
    transformers 5      mlp.gate.weight, mlp.experts.gate_up_proj [E, 2 n, hidden], .down_proj [E, hidden, n]

Scales and packed integers of quantised experts are beside them: `.experts.3.w1.qweight`,
`.experts.gate_up_proj_scale_inv`. gpt-oss's names are in experts.gpt_oss. GGUF files' stacked tensors get
these names in formats.gguf.weights.
"""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.models.experts.gpt_oss import GptOssExperts
from octavo.models.formats.quantised_tensors import StoredTensors
from octavo.models.weights import WeightSource, missing_tensor, slice_bounds

_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w1|w2|w3))\.(\w+)")
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(\w*)")
# What follows the name of a stack -> what follows the name of an expert's projection.
_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        "": "weight",
        "_scale": "weight_scale",
        "_scale_inv": "weight_scale_inv",
        "_activation_scale": "input_scale",
    }
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a shape is stored: by itself, or as an expert's part of a stack.

    Attributes:
        name: in the checkpoint.
        shape: of the tensor.
        expert: index into the stack; None: it is no stack.
        first: its first row among the expert's; None: all are its own, or shared by gate and up.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int | None = None


def with_expert_names(weights: WeightSource, *, is_gpt_oss: bool = False) -> WeightSource:
    """Return a source that hands out experts by the names above, whatever a checkpoint calls them."""
    if is_gpt_oss:
        return GptOssExperts(weights)
    places = _all_places(weights, 1)
    return weights if places is None else _Renamed(weights, places)


def with_stored_expert_names(tensors: StoredTensors, tile_rows: int = 1) -> StoredTensors:
    """Return the tensors of quantised experts by the names above; see with_expert_names.

    Args:
        tensors: the checkpoint.
        tile_rows: rows of a matrix that share a scale, where scales are for tiles.

    Raises:
        UnsupportedModelError: gate and up of a stack share a scale.
    """
    places = _all_places(tensors, tile_rows)
    return tensors if places is None else _RenamedTensors(tensors, places)


def _all_places(weights: WeightSource, tile_rows: int) -> dict[str, _Place] | None:
    """Return where each tensor is stored, or None if every one has its name already."""
    places = {here: place for name in weights.names() for here, place in _places(weights, name, tile_rows)}
    return places if any(here != place.name for here, place in places.items()) else None


class _Renamed:
    """A WeightSource over another one."""

    def __init__(self, weights: WeightSource, places: Mapping[str, _Place]) -> None:
        self._weights = weights
        self._places = places

    def names(self) -> Set[str]:
        """See WeightSource."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return self._place(name).shape

    def read(
        self, name: str, *, rows: slice | None = None, columns: slice | None = None, dtype: torch.dtype
    ) -> Tensor:
        """See WeightSource."""
        place = self._place(name)
        if place.expert is None:
            return self._weights.read(place.name, rows=rows, columns=columns, dtype=dtype)
        expert, part = _part_of(place, rows)
        return _columns(self._weights.read(place.name, rows=expert, columns=part, dtype=dtype), columns)

    def close(self) -> None:
        """See WeightSource."""
        self._weights.close()

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise missing_tensor("the checkpoint", name, self._places)
        return self._places[name]


class _RenamedTensors(_Renamed):
    """A StoredTensors over another one."""

    def __init__(self, tensors: StoredTensors, places: Mapping[str, _Place]) -> None:
        super().__init__(tensors, places)
        self._tensors = tensors

    def type_name(self, name: str) -> str:
        """See StoredTensors."""
        return self._tensors.type_name(self._place(name).name)

    def read_stored(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See StoredTensors."""
        place = self._place(name)
        if place.expert is None:
            return self._tensors.read_stored(place.name, rows=rows, columns=columns)
        expert, part = _part_of(place, rows)
        return _columns(self._tensors.read_stored(place.name, rows=expert, columns=part), columns)


def _part_of(place: _Place, rows: slice | None) -> tuple[slice, slice | None]:
    """Return the slices of a stack's first two dimensions that hold rows of an expert's tensor."""
    assert place.expert is not None, f"{place.name} is no stack"
    expert = slice(place.expert, place.expert + 1)
    if rows is None and place.first is None:
        return expert, None
    start, stop = slice_bounds(rows, place.shape[0])
    first = place.first or 0
    return expert, slice(first + start, first + stop)


def _columns(stack: Tensor, columns: slice | None) -> Tensor:
    """Return columns of the one tensor in a stack [1, ...]; a single number as [1]."""
    if stack.ndim == 1:
        return stack
    tensor = stack[0]
    return tensor if columns is None else tensor[:, columns].contiguous()


def _places(weights: WeightSource, name: str, tile_rows: int) -> Iterator[tuple[str, _Place]]:
    """Yield the tensors that a stored one holds, by their names here."""
    shape = tuple(weights.shape(name))
    if (match := _MIXTRAL.fullmatch(name)) is not None:
        prefix, expert, projection, suffix = match.groups()
        part = "gate" if expert is None else f"experts.{expert}.{_MIXTRAL_PROJECTIONS[projection]}"
        yield f"{prefix}.mlp.{part}.{suffix}", _Place(name, shape)
        return
    match = _STACKED.fullmatch(name)
    # A stack of matrices has three dimensions, its scales may have fewer.
    if match is None or match[3] not in _SUFFIXES or (not match[3] and len(shape) != 3):
        yield name, _Place(name, shape)
        return
    prefix, projection, suffix = match.groups()
    parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else ["down_proj"]
    if len(parts) == 2 and suffix in ("_scale", "_scale_inv"):
        _check_tiles(weights, name, name.removesuffix(suffix), tile_rows)
    for part, (first, inner) in zip(parts, _divide(shape[1:], len(parts)), strict=True):
        for expert in range(shape[0]):
            place = _Place(name, inner, expert, first)
            yield f"{prefix}.{expert}.{part}.{_SUFFIXES[suffix]}", place


def _divide(shape: tuple[int, ...], number: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """Divide an expert's rows among its projections: the first row and the shape of each.

    Rows that cannot be divided are whole for each: a single scale is for both, and the shape of a matrix with
    a row too many tells that it is not that of the config.
    """
    if number == 1 or not shape or shape[0] % number:
        return [(None, shape or (1,))] * number
    size = shape[0] // number
    return [(index * size, (size, *shape[1:])) for index in range(number)]


def _check_tiles(weights: WeightSource, name: str, stack: str, tile_rows: int) -> None:
    """Refuse scales for tiles of which one has rows of gate and of up.

    Raises:
        UnsupportedModelError: there is such a tile.
    """
    shape = weights.shape(name)
    if tile_rows == 1 or len(shape) != 3 or shape[1] == 1 or stack not in weights.names():
        return
    size = weights.shape(stack)[1] // 2
    # Of matrices smaller than a tile, each has a scale.
    if size % tile_rows and not (shape[1] == 2 and 2 * size <= tile_rows):
        raise UnsupportedModelError(
            f"{name}: gate and up of {size} rows each share scales for {tile_rows} rows, which is not "
            "supported"
        )
