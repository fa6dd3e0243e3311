"""Checkpoints' layouts of experts, as one: a matrix for each expert and projection.

    here, Qwen, OLMoE   mlp.gate.weight (router), mlp.experts.3.gate_proj.weight, .up_proj, .down_proj
    Mixtral             block_sparse_moe.gate.weight, .experts.3.w1.weight, .w3, .w2
    transformers 5      mlp.gate.weight, mlp.experts.gate_up_proj [E, 2 n, hidden], .down_proj [E, hidden, n]

gpt-oss's are in experts.gpt_oss. GGUF files' stacked tensors get these names in formats.gguf_weights.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.experts.gpt_oss import GptOssExperts
from octavo.models.weights import WeightSource, missing_tensor, slice_bounds

_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w1|w2|w3))\.weight")
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a matrix of a shape is stored: a tensor, or an expert of one, its rows from `first` on."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0


def with_expert_names(weights: WeightSource, config: ModelConfig) -> WeightSource:
    """Return a source that hands out experts by the names above, whatever a checkpoint calls them."""
    if config.experts is None:
        return weights
    if config.experts.has_bias:
        return GptOssExperts(weights)
    places = {here: place for name in weights.names() for here, place in _places(weights, name)}
    is_renamed = any(here != place.name for here, place in places.items())
    return _RenamedExperts(weights, places) if is_renamed else weights


class _RenamedExperts:
    """A WeightSource over another one."""

    def __init__(self, weights: WeightSource, places: dict[str, _Place]) -> None:
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
        start, stop = slice_bounds(rows, place.shape[0])
        expert = slice(place.expert, place.expert + 1)
        part = slice(place.first + start, place.first + stop)
        matrix = self._weights.read(place.name, rows=expert, columns=part, dtype=dtype)[0]
        first, last = slice_bounds(columns, place.shape[1])
        return matrix[:, first:last].contiguous()

    def close(self) -> None:
        """See WeightSource."""
        self._weights.close()

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise missing_tensor("the checkpoint", name, self._places)
        return self._places[name]


def _places(weights: WeightSource, name: str) -> Iterator[tuple[str, _Place]]:
    """Yield the matrices that a stored tensor holds, by their names here."""
    shape = tuple(weights.shape(name))
    if (match := _MIXTRAL.fullmatch(name)) is not None:
        prefix, expert, projection = match.groups()
        part = "gate" if expert is None else f"experts.{expert}.{_MIXTRAL_PROJECTIONS[projection]}"
        yield f"{prefix}.mlp.{part}.weight", _Place(name, shape)
    elif (match := _STACKED.fullmatch(name)) is not None and len(shape) == 3:
        prefix, projection = match.groups()
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else ["down_proj"]
        # Where there is a row too many, the shape tells: it is not that of the config.
        num_rows = shape[1] // len(parts) if shape[1] % len(parts) == 0 else shape[1]
        for expert in range(shape[0]):
            for number, part in enumerate(parts):
                place = _Place(name, (num_rows, shape[2]), expert, number * num_rows)
                yield f"{prefix}.{expert}.{part}.weight", place
    else:
        yield name, _Place(name, shape)
