"""What a config.json says of each layer: its window, and its rotary frequencies."""

from octavo.errors import UnsupportedModelError
from octavo.layers import RopeConfig
from octavo.layers.rope_scaling import without_rotation
from octavo.models.config_fields import ConfigFields
from octavo.models.families.family import Family


def read_layer_types(fields: ConfigFields, family: Family, num_layers: int) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer.

    Raises:
        UnsupportedModelError: a layer is of another type, or layers mix types where the family has one.
        FileFormatError: a field is missing or malformed.
    """
    by_rule = [_slides(fields, family, index) for index in range(num_layers)]
    names = ["sliding_attention" if slides else "full_attention" for slides in by_rule]
    given = fields.get("layer_types")
    if given is None:
        return names
    if not isinstance(given, list) or len(given) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} names, one per layer", given)
    for name in given:
        if name not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{fields.where}: layer type {name!r} is not supported")
    if family.window_rule in ("never", "always") and given != names:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types that differ from {names[0]!r} are not supported"
        )
    return given


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
    rotary_dim: int,
) -> list[RopeConfig]:
    """Return each layer's rotary frequencies.

    Args:
        fields: of config.json.
        family: its family.
        layer_types: of each layer.
        ropes: those of each type of layer.
        rotary_dim: dimensions of a head that turn.

    Raises:
        FileFormatError: no_rope_layers is malformed.
    """
    none = without_rotation(rotary_dim)
    return [
        ropes[layer_type] if _has_rope(fields, family, index) else none
        for index, layer_type in enumerate(layer_types)
    ]


def _slides(fields: ConfigFields, family: Family, index: int) -> bool:
    if fields.get("sliding_window") is None:
        return False
    if family.window_rule == "all_but_every_nth":
        return (index + 1) % fields.integer("sliding_window_pattern") != 0
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


def _has_rope(fields: ConfigFields, family: Family, index: int) -> bool:
    """Return whether a layer rotates queries and keys: no_rope_layers has 1 for layers that do."""
    if not family.has_nope_layers:
        return True
    given = fields.get("no_rope_layers")
    if given is None:
        return (index + 1) % fields.integer("no_rope_layer_interval") != 0
    if not isinstance(given, list) or len(given) <= index or given[index] not in (0, 1):
        raise fields.error("no_rope_layers", "a list of 0 or 1 for each layer", given)
    return bool(given[index])
