"""Checkpoints whose projections of one input are one matrix, as a matrix for each projection.

here     self_attn.q_proj.weight, .k_proj, .v_proj    mlp.gate_proj.weight, .up_proj
Phi-3    self_attn.qkv_proj.weight [q | k | v]        mlp.gate_up_proj.weight [gate | up]
"""

from collections.abc import Mapping
from itertools import accumulate, chain
from types import MappingProxyType

from octavo.errors import WeightsError
from octavo.models.model_config import ModelConfig
from octavo.models.parameters import parameter_shapes
from octavo.models.renamed import Place, by_name, renamed
from octavo.models.weights import WeightSource

_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


def with_own_projections(weights: WeightSource, config: ModelConfig) -> WeightSource:
    """Return a source that hands out each projection by its own name.

    Raises:
        WeightsError: a stored matrix does not have the rows of its projections, or one is there twice.
    """
    if not config.has_fused_projections:
        return weights
    shapes = parameter_shapes(config)
    num_rows = {
        f"model.layers.{layer}.{fused}.weight": {
            name: shapes[name][0] for name in (f"model.layers.{layer}.{part}.weight" for part in parts)
        }
        for layer in range(config.num_layers)
        for fused, parts in _FUSED.items()
    }
    stored = (Place(name=name, shape=tuple(weights.shape(name))) for name in sorted(weights.names()))
    places = (
        _parts(place, num_rows[place.name]) if place.name in num_rows else [(place.name, place)]
        for place in stored
    )
    return renamed(weights, by_name(chain.from_iterable(places)))


def _parts(stored: Place, num_rows: Mapping[str, int]) -> list[tuple[str, Place]]:
    """Return the projections of a stored matrix, given the rows of each."""
    if stored.shape[0] != sum(num_rows.values()):
        raise WeightsError(
            f"{stored.name} is {list(stored.shape)}, expected {sum(num_rows.values())} rows for "
            f"{', '.join(num_rows)} together"
        )
    firsts = accumulate(num_rows.values(), initial=0)
    return [
        (name, Place(name=stored.name, shape=(size, *stored.shape[1:]), first=first))
        for (name, size), first in zip(num_rows.items(), firsts, strict=False)
    ]
