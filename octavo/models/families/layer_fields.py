"""What a config.json says of each layer: its window, and its rotary frequencies in all spellings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.layers import RopeConfig
from octavo.layers.rope_scaling import RopeType, without_rotation
from octavo.models.config_fields import ConfigFields, words
from octavo.models.families.family import Family

_DEFAULT_THETA = 10_000.0
_PARTIAL = "partial_rotary_factor"
# Ministral 3's; the second only repeats a field of the whole config.
_GROWTH = ("llama_4_scaling_beta", "max_position_embeddings")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# "finetuned" is a remark that early YaRN checkpoints carry.
_KNOWN_KEYS = words(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast",
    "beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor factors long_factor",
    "short_factor finetuned",
) | {_PARTIAL}


def read_ropes(fields: ConfigFields, family: Family, rotary_dims: Mapping[str, int]) -> dict[str, RopeConfig]:
    """Return the rotary frequencies of each layer type, given how many dimensions of its heads turn.

    Accepted: rope_theta and rope_scaling (with "type" or "rope_type") side by side; rope_parameters with
    everything in one; rope_parameters by layer type; rope_local_base_freq for sliding layers. Where a file
    has both keys, rope_scaling counts, as in Hugging Face transformers 5; families with local frequencies
    write it into the full layers' rope_parameters.

    Returns:
        "full_attention" and "sliding_attention", equal unless the family keeps them apart.

    Raises:
        UnsupportedModelError: a type or key that Octavo does not have.
        FileFormatError: a value is malformed.
    """
    found = _rope_parameters(fields, family)
    read = {_PARTIAL: family.has_partial_rotary, **dict.fromkeys(_GROWTH, family.has_query_growth)}
    parameters = {name: value for name, value in found.items() if not read.get(name)}
    nested = {name: parameters[name] for name in _LAYER_TYPES if name in parameters}
    if nested and len(nested) != len(parameters):
        raise fields.error("rope_parameters", "one object, or one per layer type", parameters)
    full = nested.get("full_attention") if nested else parameters
    theta = fields.number("rope_theta", _DEFAULT_THETA, minimum=1.0)
    ropes = {"full_attention": _read_rope(fields, full, theta, rotary_dims["full_attention"])}
    if family.has_query_growth and found.get(_GROWTH[0]) is not None:
        inner = ConfigFields(found, {}, where=f"{fields.where}: rope_parameters")
        period = inner.integer("original_max_position_embeddings")
        growth = {"query_growth": inner.number(_GROWTH[0]), "original_max_positions": period}
        ropes["full_attention"] = replace(ropes["full_attention"], **growth)
    ropes["sliding_attention"] = ropes["full_attention"]
    if family.has_local_rope:
        theta = fields.number("rope_local_base_freq", theta, minimum=1.0)
    if family.has_local_rope or nested:
        # A scaling without layer types is meant only for the full layers.
        sliding, rotary_dim = nested.get("sliding_attention"), rotary_dims["sliding_attention"]
        ropes["sliding_attention"] = _read_rope(fields, sliding, theta, rotary_dim)
    return ropes


def read_rotary_dims(
    fields: ConfigFields, family: Family, layer_types: Sequence[str], head_dims: Sequence[int]
) -> dict[str, int]:
    """Return how many dimensions of a head, the first ones, are rotated, in layers of each type."""
    of_types = dict.fromkeys(_LAYER_TYPES, head_dims[0]) | dict(zip(layer_types, head_dims, strict=True))
    return {name: _read_rotary_dim(fields, family, head_dim) for name, head_dim in of_types.items()}


def _read_rotary_dim(fields: ConfigFields, family: Family, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated, by partial_rotary_factor.

    It may be beside the rotary parameters or among them; among them it counts, as in transformers 5.

    Raises:
        FileFormatError: it is malformed.
    """
    if not family.has_partial_rotary:
        return head_dim
    inner = ConfigFields(_rope_parameters(fields, family), {}, where=f"{fields.where}: rope_parameters")
    found = fields if inner.get(_PARTIAL) is None else inner
    if found is fields and fields.get("rotary_dim") is not None:
        return fields.integer("rotary_dim", minimum=4, maximum=head_dim) // 2 * 2
    factor = found.number(_PARTIAL, 1.0)
    rotary_dim = int(head_dim * min(factor, 1.0))
    if factor > 1 or rotary_dim < 4 or rotary_dim % 2:
        raise found.error(_PARTIAL, f"a part of {head_dim} dimensions, an even number of at least 4", factor)
    return rotary_dim


def _rope_parameters(fields: ConfigFields, family: Family) -> Mapping[str, object]:
    """Return the parameters that count, of the two keys a file may have."""
    parameters, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if not parameters or not family.has_local_rope:
        return scaling or parameters
    if not any(name in parameters for name in _LAYER_TYPES):
        raise fields.error("rope_parameters", f"one object for each of {', '.join(_LAYER_TYPES)}", parameters)
    full = parameters.get("full_attention")
    if not scaling or not isinstance(full, Mapping | None):
        return parameters
    return {**parameters, "full_attention": {**(full or {}), **scaling}}


def _read_rope(config: ConfigFields, parameters: object, theta: float, rotary_dim: int) -> RopeConfig:
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise config.error("rope_parameters", "an object", parameters)
    for name in parameters:
        if name not in _KNOWN_KEYS:
            raise UnsupportedModelError(
                f"{config.where}: rope parameter {name!r} is not supported{suggest(name, _KNOWN_KEYS)}"
            )
    fields = ConfigFields(parameters, {}, where=f"{config.where}: rope_parameters")
    theta = fields.number("rope_theta", theta, minimum=1.0)
    rope_type = _read_type(fields)
    if rope_type == "proportional":
        proportion, factor = fields.number(_PARTIAL, 1.0), fields.number("factor", 1.0)
        if proportion > 1:
            raise fields.error(_PARTIAL, "a part of 1", proportion)
        return RopeConfig(theta=theta, rope_type=rope_type, factor=factor, proportion=proportion)
    fields.require_neutral({_PARTIAL: (1,)})
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "factors":
        factors = _read_factors(fields, "factors", rotary_dim)
        return RopeConfig(theta=theta, rope_type=rope_type, factors=factors)
    if rope_type == "longrope":
        return _read_longrope(config, fields, theta, rotary_dim)
    return _read_stretched(config, fields, theta, rope_type)


def _read_type(fields: ConfigFields) -> RopeType:
    name = fields.get("rope_type") or fields.get("type") or "default"
    # The first Phi-3 checkpoints have an older name.
    name = "longrope" if name == "su" else name
    for rope_type in get_args(RopeType):
        if name == rope_type:
            return rope_type
    raise UnsupportedModelError(
        f"{fields.where}: rope_type {name!r} is not supported{suggest(str(name), get_args(RopeType))}; "
        f"supported: {', '.join(get_args(RopeType))}"
    )


def _read_factors(fields: ConfigFields, name: str, rotary_dim: int) -> tuple[float, ...]:
    factors = fields.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != rotary_dim // 2:
        raise fields.error(name, f"a list of {rotary_dim // 2} numbers, one per frequency", factors)
    by_index = {str(index): factor for index, factor in enumerate(factors)}
    checked = ConfigFields(by_index, {}, where=f"{fields.where}: {name}")
    return tuple(checked.number(index) for index in by_index)


def _read_longrope(config: ConfigFields, fields: ConfigFields, theta: float, rotary_dim: int) -> RopeConfig:
    positions, original = _read_positions(config, fields)
    return RopeConfig(
        theta=theta,
        rope_type="longrope",
        factor=fields.number("factor", positions / original),
        original_max_positions=original,
        attention_factor=fields.optional_number("attention_factor"),
        factors=_read_factors(fields, "long_factor", rotary_dim),
        short_factors=_read_factors(fields, "short_factor", rotary_dim),
    )


def _read_positions(config: ConfigFields, fields: ConfigFields) -> tuple[int, int]:
    """Return the context in tokens, stretched and before; some checkpoints keep the latter outside."""
    positions = config.integer("max_position_embeddings")
    original = config.integer("original_max_position_embeddings", positions)
    return positions, fields.integer("original_max_position_embeddings", original)


def _read_stretched(
    config: ConfigFields, fields: ConfigFields, theta: float, rope_type: RopeType
) -> RopeConfig:
    positions = original = config.integer("max_position_embeddings")
    if rope_type in ("llama3", "yarn"):
        positions, original = _read_positions(config, fields)
    rope = RopeConfig(
        theta=theta,
        rope_type=rope_type,
        # YaRN's factor may be left to the ratio of the two contexts.
        factor=fields.number("factor", positions / original if rope_type == "yarn" else None),
        original_max_positions=original,
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        beta_fast=_number_or_default(fields, "beta_fast", 32.0),
        beta_slow=_number_or_default(fields, "beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
        attention_factor=fields.optional_number("attention_factor"),
        mscale=_number_or_default(fields, "mscale", 0.0),
        mscale_all_dim=_number_or_default(fields, "mscale_all_dim", 0.0),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise FileFormatError(f"{fields.where}: high_freq_factor must be above low_freq_factor")
    return rope


def _number_or_default(fields: ConfigFields, name: str, default: float) -> float:
    """Return a positive number; 0 counts as absent, as in transformers and llama.cpp."""
    value = fields.get(name)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return default
    return fields.number(name)


def read_layer_types(fields: ConfigFields, family: Family, num_layers: int) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer.

    Raises:
        UnsupportedModelError: a layer is of another type, or layers mix types where the family has one.
        FileFormatError: a field is missing or malformed.
    """
    by_rule = [_slides(fields, family, index) for index in range(num_layers)]
    names = ["sliding_attention" if slides else "full_attention" for slides in by_rule]
    value = fields.get("layer_types")
    if family.window_rule == "all_but_every_nth_and_last" and isinstance(value, list):
        # Whatever it says, the last layer sees all keys.
        value = [*value[:-1], "full_attention"]
    if value is None:
        return names
    if isinstance(value, list):
        value = ["full_attention" if name == "attention" else name for name in value]
    if not isinstance(value, list) or len(value) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} names, one per layer", value)
    for name in value:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{fields.where}: layer type {name!r} is not supported")
    if family.window_rule in ("never", "always") and value != names:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types that differ from {names[0]!r} are not supported"
        )
    return value


def read_windows(fields: ConfigFields, layer_types: list[str]) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None: all.

    Raises:
        FileFormatError: layers slide, but the window is missing or malformed.
    """
    if "sliding_attention" not in layer_types:
        return (None,) * len(layer_types)
    if fields.get("sliding_window") is None:
        raise fields.error("sliding_window", "a number of tokens, as layer_types has sliding layers", None)
    window = fields.integer("sliding_window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def read_layer_ropes(
    fields: ConfigFields,
    family: Family,
    layer_types: list[str],
    ropes: dict[str, RopeConfig],
    rotary_dims: Mapping[str, int],
) -> list[RopeConfig]:
    """Return each layer's rotary frequencies.

    Args:
        fields: of config.json.
        family: its family.
        layer_types: of each layer.
        ropes: those of each type of layer.
        rotary_dims: rotated dimensions of a head, of each type of layer.

    Raises:
        FileFormatError: no_rope_layers is malformed.
    """
    skips_full = family.has_nope_full_layers and fields.get("sliding_window") is not None
    return [
        without_rotation(rotary_dims[name])
        if (skips_full and name == "full_attention") or not _has_rope(fields, family, index)
        else ropes[name]
        for index, name in enumerate(layer_types)
    ]


def _slides(fields: ConfigFields, family: Family, index: int) -> bool:
    if fields.get("sliding_window") is None:
        return False
    if family.window_rule == "all_but_every_nth":
        return _slides_by_pattern(fields, index)
    if family.window_rule == "all_but_every_nth_and_last":
        return _slides_by_pattern(fields, index) and index + 1 < fields.integer("num_hidden_layers")
    if family.window_rule == "after_max_window_layers":
        return fields.boolean("use_sliding_window") and index >= fields.integer(
            "max_window_layers", minimum=0
        )
    if family.window_rule == "when_used":
        return fields.boolean("use_sliding_window")
    if family.window_rule == "without_rope":
        return fields.boolean("use_sliding_window") and not _has_rope(fields, family, index)
    if family.window_rule == "never":
        raise UnsupportedModelError(
            f"{fields.where}: {family.architecture} with a sliding_window is not supported"
        )
    return True


def _slides_by_pattern(fields: ConfigFields, index: int) -> bool:
    """Read every how many layers one sees all keys, or letters: "LLLG" is three local layers, one global."""
    pattern = fields.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return (index + 1) % fields.integer("sliding_window_pattern") != 0
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.error("sliding_window_pattern", "a number, or letters L and G", pattern)
    return pattern[index % len(pattern)] == "L" and index + 1 < fields.integer("num_hidden_layers")


def _has_rope(fields: ConfigFields, family: Family, index: int) -> bool:
    """Return whether a layer rotates queries and keys: no_rope_layers has 1 for layers that do."""
    if family.rope_key is not None:
        fields.require_one_of(family.rope_key, ("rope", "nope", None))
        return fields.get(family.rope_key) == "rope"
    if not family.has_nope_layers:
        return True
    value = fields.get("no_rope_layers")
    if value is None:
        return (index + 1) % fields.integer("no_rope_layer_interval") != 0
    if not isinstance(value, list) or len(value) <= index or value[index] not in (0, 1):
        raise fields.error("no_rope_layers", "a list of 0 or 1 for each layer", value)
    return bool(value[index])
