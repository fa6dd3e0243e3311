"""gpt-oss's names and layout of experts, as a matrix and a bias for each expert and projection.

    mlp.router.weight, .bias                           mlp.gate.weight, .bias
    mlp.experts.gate_up_proj [E, hidden, 2 n]          mlp.experts.3.gate_proj.weight, .up_proj.weight
    mlp.experts.gate_up_proj_bias [E, 2 n]             the same with .bias
    mlp.experts.down_proj [E, n, hidden]               mlp.experts.3.down_proj.weight
    mlp.experts.down_proj_bias [E, hidden]             mlp.experts.3.down_proj.bias

Gate and up take turns along 2 n. Stacks in MXFP4 have the names on the right already; see formats.mxfp4.
"""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.linear.quantised import QuantisedWeight, Storage
from octavo.models.weights import CPU, QuantisedSource, WeightSource, missing_tensor, slice_bounds

_ROUTER = re.compile(r"(.*\.mlp)\.router\.(weight|bias)")
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a shape is stored: a tensor; or of an expert of a stack, numbers first, first + step.

    The last dimension of a stack is the first one here.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0
    step: int = 1


class GptOssExperts:
    """A WeightSource and QuantisedSource over another one."""

    def __init__(self, weights: WeightSource) -> None:
        """Wrap a checkpoint; closed by `close`."""
        self._weights = weights
        self._places = {here: place for name in weights.names() for here, place in _places(weights, name)}
        self._storage = dict(weights.storage()) if isinstance(weights, QuantisedSource) else {}

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
        expert, turns = slice(place.expert, place.expert + 1), slice(place.step * start, place.step * stop)
        if len(place.shape) == 1:
            vector = self._weights.read(place.name, rows=expert, columns=turns, dtype=dtype)[0]
            return vector[place.first :: place.step].contiguous()
        matrix = self._weights.read(place.name, rows=expert, columns=columns, dtype=dtype)[0]
        return matrix[:, turns][:, place.first :: place.step].T.contiguous()

    def storage(self) -> Mapping[str, Storage]:
        """See QuantisedSource."""
        return self._storage

    def read_quantised(
        self,
        name: str,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        device: torch.device = CPU,
    ) -> QuantisedWeight:
        """See QuantisedSource."""
        assert isinstance(self._weights, QuantisedSource), f"{name} is not stored quantised"
        return self._weights.read_quantised(name, rows=rows, columns=columns, device=device)

    def close(self) -> None:
        """See WeightSource."""
        self._weights.close()

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise missing_tensor("the checkpoint", name, self._places)
        return self._places[name]


def _places(weights: WeightSource, name: str) -> Iterator[tuple[str, _Place]]:
    """Yield what a stored tensor holds, by the names here."""
    shape = tuple(weights.shape(name))
    router, stack = _ROUTER.fullmatch(name), _STACK.fullmatch(name)
    if router is not None:
        yield f"{router[1]}.gate.{router[2]}", _Place(name, shape)
    elif stack is not None and len(shape) == (2 if stack[3] else 3):
        parts = _PARTS[stack[2]]
        # Where there is one too many, the shape tells: it is not that of the config.
        size = shape[-1] // len(parts) if shape[-1] % len(parts) == 0 else shape[-1]
        for expert in range(shape[0]):
            for first, part in enumerate(parts):
                here = f"{stack[1]}.{expert}.{part}.{'bias' if stack[3] else 'weight'}"
                yield here, _Place(name, (size, *shape[1:-1]), expert, first, len(parts))
    else:
        yield name, _Place(name, shape)
