"""Reads the quantization_config of compressed-tensors: groups of layers, and a format for their tensors."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.errors import UnsupportedModelError
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats import float4
from octavo.models.formats.float4 import Float4Scheme
from octavo.models.formats.float8_scheme import MXFP8, Float8Scheme
from octavo.models.formats.integers.int_quantized import IntQuantizedScheme
from octavo.models.formats.integers.pack_quantized import PackQuantizedScheme
from octavo.models.formats.matrix_schemes import MatrixScheme, MixedScheme
from octavo.models.formats.scheme_fields import ARGUMENTS, check_cache, check_patterns, read_block

_KEYS = words(
    "config_groups format global_compression_ratio ignore kv_cache_scheme moe_sparsity_config",
    "provider quant_method quantization_status sparsity_config transform_config version",
)
# Values of actorder: a group has neighbouring columns, or columns from anywhere.
_IN_ORDER, _ORDERED = (None, False, "static", "weight"), (True, "dynamic", "group")
_GROUP_KEYS = frozenset({"format", "input_activations", "output_activations", "targets", "weights"})


def read_compressed_tensors(fields: ConfigFields) -> MatrixScheme | MixedScheme | None:
    """Return the scheme, or None where only the KV cache is quantised; see schemes.read_scheme."""
    fields.require_known(_KEYS)
    check_cache(fields)
    groups = fields.mapping("config_groups")
    if not groups:
        return None
    fields.require_one_of("quantization_status", ("compressed", "frozen", None))
    for name in ("moe_sparsity_config", "sparsity_config", "transform_config"):
        if fields.mapping(name):
            raise UnsupportedModelError(f"{fields.where}: {name} = {fields.get(name)!r} is not supported")
    check_patterns(fields, "ignore")
    schemes = [_read_group(fields, name, group) for name, group in groups.items()]
    return schemes[0] if len(schemes) == 1 else MixedScheme(schemes)


def _read_group(fields: ConfigFields, name: str, group: object) -> MatrixScheme:
    where = f"{fields.where}: config_groups: {name}"
    if not isinstance(group, Mapping):
        raise fields.error(f"config_groups: {name}", "an object", group)
    inner = ConfigFields(group, {}, where=where)
    inner.require_known(_GROUP_KEYS)
    check_patterns(inner, "targets")
    if inner.get("output_activations") is not None:
        raise UnsupportedModelError(f"{where}: quantised output_activations are not supported")
    form = inner.get("format") or fields.get("format")
    if not isinstance(form, str) or form not in _FORMATS:
        raise UnsupportedModelError(
            f"{where}: format {form!r} is not supported; supported: {', '.join(_FORMATS)}"
        )
    return _FORMATS[form](inner)


def arguments_of(group: ConfigFields, name: str) -> ConfigFields:
    """Return the arguments of a group's weights or activations.

    Raises:
        UnsupportedModelError: an argument is unknown.
        FileFormatError: it is not an object.
    """
    defaults = {"symmetric": True, "dynamic": False}
    arguments = ConfigFields(group.mapping(name), defaults, where=f"{group.where}: {name}")
    arguments.require_known(ARGUMENTS)
    return arguments


def _read_float8(group: ConfigFields) -> Float8Scheme:
    weights = arguments_of(group, "weights")
    weights.require_one_of("type", ("float",))
    weights.require_one_of("num_bits", (8,))
    weights.require_one_of("strategy", ("tensor", "channel", "block"))
    weights.require_one_of("symmetric", (True,))
    weights.require_one_of("dynamic", (False,))
    inputs = _inputs_of(group, ("float",), (8,))
    is_static = False
    if inputs is not None:
        inputs.require_one_of("strategy", ("tensor", "token", "group"))
        inputs.require_one_of("dynamic", (True, False))
        is_static = inputs.get("dynamic") is False
    tile = read_block(weights, "block_structure") if weights.get("strategy") == "block" else None
    return Float8Scheme("weight_scale", tile, has_input_scales=is_static)


def _read_pack_quantized(group: ConfigFields) -> PackQuantizedScheme:
    if group.get("input_activations") is not None:
        raise UnsupportedModelError(f"{group.where}: quantised input_activations are not supported")
    weights, group_size = _integers_of(group, ("channel", "group"), (*_IN_ORDER, *_ORDERED))
    return PackQuantizedScheme(
        weights.integer("num_bits"),
        group_size,
        is_symmetric=weights.boolean("symmetric"),
        is_ordered=group_size != -1 and weights.get("actorder") in _ORDERED,
    )


def _read_int_quantized(group: ConfigFields) -> IntQuantizedScheme:
    _inputs_of(group, ("float", "int"), (8,))
    weights, group_size = _integers_of(group, ("tensor", "channel", "group"), _IN_ORDER)
    return IntQuantizedScheme(
        weights.integer("num_bits"),
        group_size,
        is_symmetric=weights.boolean("symmetric"),
        has_one_scale=weights.get("strategy") == "tensor",
    )


def _integers_of(
    group: ConfigFields, strategies: tuple[str, ...], orders: tuple[object, ...]
) -> tuple[ConfigFields, int]:
    """Return the checked arguments of weights that are integers, and columns that share a scale; -1: all."""
    weights = arguments_of(group, "weights")
    weights.require_one_of("type", ("int",))
    weights.require_one_of("num_bits", (4, 8))
    weights.require_one_of("strategy", strategies)
    weights.require_one_of("symmetric", (True, False))
    weights.require_one_of("dynamic", (False,))
    weights.require_one_of("actorder", orders)
    by_group = weights.get("strategy") == "group"
    return weights, weights.integer("group_size", maximum=2**20) if by_group else -1


def _inputs_of(group: ConfigFields, types: tuple[str, ...], bits: tuple[int, ...]) -> ConfigFields | None:
    """Return the arguments of activations, checked, or None where they are not quantised."""
    if group.get("input_activations") is None:
        return None
    inputs = arguments_of(group, "input_activations")
    inputs.require_one_of("type", types)
    inputs.require_one_of("num_bits", bits)
    return inputs


def _read_mxfp8(group: ConfigFields) -> Float8Scheme:
    _check_floats(group, 8, "group", 32)
    return MXFP8


def _read_mxfp4(group: ConfigFields) -> Float4Scheme:
    _check_floats(group, 4, "group", 32)
    return Float4Scheme(float4.COMPRESSED, is_nv=False)


def _read_nvfp4(group: ConfigFields) -> Float4Scheme:
    _check_floats(group, 4, "tensor_group", 16)
    return Float4Scheme(float4.COMPRESSED, is_nv=True)


def _check_floats(group: ConfigFields, bits: int, strategy: str, size: int) -> None:
    """Check weights of small floats, whose scales are small, too; activations may be alike, or float8."""
    _inputs_of(group, ("float",), (4, 8))
    weights = arguments_of(group, "weights")
    weights.require_one_of("type", ("float",))
    weights.require_one_of("num_bits", (bits,))
    weights.require_one_of("strategy", (strategy,))
    weights.require_one_of("group_size", (size,))
    weights.require_one_of("symmetric", (True,))
    weights.require_one_of("dynamic", (False,))


# format -> reads a group of layers.
_FORMATS: Mapping[str, Callable[[ConfigFields], MatrixScheme]] = MappingProxyType(
    {
        "float-quantized": _read_float8,
        # What llm-compressor calls float8 weights whose activations are not quantised.
        "naive-quantized": _read_float8,
        "int-quantized": _read_int_quantized,
        "mxfp4-pack-quantized": _read_mxfp4,
        "mxfp8-quantized": _read_mxfp8,
        "nvfp4-pack-quantized": _read_nvfp4,
        "pack-quantized": _read_pack_quantized,
    }
)
