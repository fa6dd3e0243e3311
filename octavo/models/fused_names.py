"""Checkpoints whose projections of one input are one matrix, as a matrix for each projection.

here     self_attn.q_proj.weight, .k_proj, .v_proj    mlp.gate_proj.weight, .up_proj
Phi-3    self_attn.qkv_proj.weight [q | k | v]        mlp.gate_up_proj.weight [gate | up]
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.layers.linear.quantised import QuantisedWeight, Storage
from octavo.models.config import ModelConfig
from octavo.models.parameters import parameter_shapes
from octavo.models.weights import CPU, QuantisedSource, WeightSource, slice_bounds

_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a stored matrix."""

    name: str
    first: int
    num_rows: int

    def rows(self, part: slice | None) -> slice:
        """Return the stored rows that hold some of the part's."""
        start, stop = slice_bounds(part, self.num_rows)
        return slice(self.first + start, self.first + stop)


def with_own_projections(weights: WeightSource, config: ModelConfig) -> WeightSource:
    """Return a source that hands out each projection by its own name.

    Raises:
        WeightsError: a stored matrix does not have the rows of its projections.
    """
    if not config.has_fused_projections:
        return weights
    parts = _parts(weights, config)
    return (_Quantised if isinstance(weights, QuantisedSource) else _Plain)(weights, parts)


def _parts(weights: WeightSource, config: ModelConfig) -> dict[str, _Part]:
    shapes = parameter_shapes(config)
    parts: dict[str, _Part] = {}
    for layer in range(config.num_layers):
        for fused, names in _FUSED.items():
            stored = f"model.layers.{layer}.{fused}.weight"
            if stored not in weights.names():
                continue
            first = 0
            for name in (f"model.layers.{layer}.{each}.weight" for each in names):
                parts[name] = _Part(stored, first, shapes[name][0])
                first += shapes[name][0]
            if weights.shape(stored)[0] != first:
                raise WeightsError(
                    f"{stored} is {list(weights.shape(stored))}, expected {first} rows for "
                    f"{', '.join(names)} together"
                )
    return parts


class _Plain:
    """A WeightSource over another one."""

    def __init__(self, weights: WeightSource, parts: Mapping[str, _Part]) -> None:
        self._weights = weights
        self._parts = parts

    def names(self) -> Set[str]:
        """See WeightSource."""
        return (self._weights.names() - {part.name for part in self._parts.values()}) | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        part = self._parts.get(name)
        return (
            self._weights.shape(name)
            if part is None
            else (part.num_rows, *self._weights.shape(part.name)[1:])
        )

    def read(
        self, name: str, *, rows: slice | None = None, columns: slice | None = None, dtype: torch.dtype
    ) -> Tensor:
        """See WeightSource."""
        part = self._parts.get(name)
        if part is not None:
            name, rows = part.name, part.rows(rows)
        return self._weights.read(name, rows=rows, columns=columns, dtype=dtype)

    def close(self) -> None:
        """See WeightSource."""
        self._weights.close()


class _Quantised(_Plain):
    """A QuantisedSource over another one."""

    def __init__(self, weights: WeightSource, parts: Mapping[str, _Part]) -> None:
        super().__init__(weights, parts)
        assert isinstance(weights, QuantisedSource), "a source without quantised matrices"
        self._quantised = weights

    def storage(self) -> Mapping[str, Storage]:
        """See QuantisedSource."""
        stored = self._quantised.storage()
        own = {name: stored[part.name] for name, part in self._parts.items() if part.name in stored}
        return {name: each for name, each in stored.items() if name in self.names()} | own

    def read_quantised(
        self,
        name: str,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        device: torch.device = CPU,
    ) -> QuantisedWeight:
        """See QuantisedSource."""
        part = self._parts.get(name)
        if part is not None:
            name, rows = part.name, part.rows(rows)
        return self._quantised.read_quantised(name, rows=rows, columns=columns, device=device)
