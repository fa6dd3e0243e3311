"""What a config.json says of the keys and values that layers keep, and of layers that keep none."""

from collections.abc import Mapping, Sequence

from octavo.errors import FileFormatError
from octavo.kv.cache_layers import CacheLayer
from octavo.models.config_fields import ConfigFields, words
from octavo.models.families.family import Family

# What per_layer_config may say of a layer.
_OWN_KEYS = words("head_dim num_key_value_heads")


def read_cache_layers(
    fields: ConfigFields, family: Family, layer_types: Sequence[str], windows: Sequence[int | None]
) -> tuple[CacheLayer, ...]:
    """Return what each layer keeps, or would keep if it did not read another layer's keys and values.

    Raises:
        FileFormatError: a field is missing or malformed.
    """
    num_heads = fields.integer("num_attention_heads", maximum=2**14)
    default_dim = max(1, fields.integer("hidden_size", maximum=2**20) // num_heads)
    usual = _read_heads(fields, num_heads, default_dim)
    heads = [usual] * len(layer_types)
    if family.has_full_heads:
        own = fields.mapping("per_layer_config")
        if fields.get("per_layer_config") is None:
            own = _full_layers(fields, usual, layer_types)
        for key, given in own.items():
            layer = int(key) if key.isdecimal() else len(heads)
            if layer >= len(heads) or not isinstance(given, Mapping):
                raise fields.error("per_layer_config", f"objects by layers below {len(heads)}", own)
            one = ConfigFields(given, {}, where=f"{fields.where}: per_layer_config: {key}")
            one.require_known(_OWN_KEYS)
            heads[layer] = _read_heads(one, num_heads, usual[1], usual[0])
    return tuple(CacheLayer(*of_layer, window) for of_layer, window in zip(heads, windows, strict=True))


def _full_layers(
    fields: ConfigFields, usual: tuple[int, int], layer_types: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Return what per_layer_config would say of the layers without a window."""
    number = usual[0]
    if fields.boolean("attention_k_eq_v"):
        number = fields.integer("num_global_key_value_heads", number)
    own: dict[str, object] = {
        "head_dim": fields.integer("global_head_dim", 512),
        "num_key_value_heads": number,
    }
    return {str(index): own for index, name in enumerate(layer_types) if name == "full_attention"}


def _read_heads(
    fields: ConfigFields, num_heads: int, head_dim: int, num_kv_heads: int | None = None
) -> tuple[int, int]:
    head_dim = fields.integer("head_dim", head_dim, minimum=4, maximum=2**14)
    number = fields.integer("num_key_value_heads", num_kv_heads or num_heads, maximum=num_heads)
    if num_heads % number:
        raise FileFormatError(
            f"{fields.where}: num_key_value_heads must divide num_attention_heads = {num_heads}, got {number}"
        )
    if head_dim % 2:
        raise FileFormatError(f"{fields.where}: head_dim must be even, got {head_dim}")
    return number, head_dim


def read_layer_caches(fields: ConfigFields, family: Family, layers: Sequence[CacheLayer]) -> tuple[int, ...]:
    """Return for each layer the one whose keys and values it reads: itself, or the last alike that has any.

    Raises:
        FileFormatError: num_kv_shared_layers is malformed, or leaves a layer without one to share with.
    """
    num_layers = len(layers)
    num_shared = 0
    if family.has_shared_caches:
        num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0, maximum=num_layers - 1)
    kept = list(layers[: num_layers - num_shared])
    for layer in layers[len(kept) :]:
        if layer not in kept:
            fewer = "fewer layers, so that each has one to share with"
            raise fields.error("num_kv_shared_layers", fewer, num_shared)
    last = {layer: index for index, layer in enumerate(kept)}
    return (*range(len(kept)), *(last[layer] for layer in layers[len(kept) :]))
