"""Reads what a quantization_config says of float8 matrices: the methods fp8 and modelopt."""

import re

from octavo.errors import FileFormatError, UnsupportedModelError, refuse_unknown
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.float8 import Float8Scheme

_FP8_KEYS = frozenset(
    {
        *("activation_scheme", "fmt", "ignored_layers", "kv_cache_scheme", "modules_to_not_convert"),
        *("quant_method", "scale_fmt", "weight_block_size"),
    }
)
_MODELOPT_KEYS = frozenset(
    {
        *("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer"),
        *("quant_algo", "quant_method"),
    }
)


def read_fp8(fields: ConfigFields) -> Float8Scheme:
    """Read quant_method "fp8": a scale for each tile of weight_block_size, or for each matrix."""
    refuse_unknown(UnsupportedModelError, f"{fields.where}: unknown field", fields.names(), _FP8_KEYS)
    refuse_other_values(fields, "fmt", ("e4m3", None))
    refuse_other_values(fields, "activation_scheme", ("dynamic", "static", None))
    refuse_other_values(fields, "scale_fmt", ("float", "ue8m0", None))
    for name in ("ignored_layers", "modules_to_not_convert"):
        check_patterns(fields, name)
    has_input_scales = fields.get("activation_scheme") == "static"
    if fields.get("weight_block_size") is None:
        return Float8Scheme("weight_scale", None, has_input_scales)
    return Float8Scheme("weight_scale_inv", read_block(fields, "weight_block_size"), has_input_scales)


def read_modelopt(fields: ConfigFields) -> Float8Scheme:
    """Read quant_method "modelopt" with quant_algo "FP8": a scale for each matrix and for its inputs."""
    refuse_unknown(UnsupportedModelError, f"{fields.where}: unknown field", fields.names(), _MODELOPT_KEYS)
    refuse_other_values(fields, "quant_algo", ("FP8",))
    for name in ("exclude_modules", "ignore"):
        check_patterns(fields, name)
    return Float8Scheme("weight_scale", None, has_input_scales=True)


def refuse_other_values(fields: ConfigFields, name: str, supported: tuple[object, ...]) -> None:
    """Raise UnsupportedModelError if a field is none of the values that are supported."""
    value = fields.get(name)
    if not any(value is each or (type(value) is type(each) and value == each) for each in supported):
        names = ", ".join(repr(each) for each in supported if each is not None)
        raise UnsupportedModelError(
            f"{fields.where}: {name} = {value!r} is not supported; supported: {names}"
        )


def read_block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tile that shares a scale.

    Raises:
        FileFormatError: the field is not two positive integers.
    """
    value = fields.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each < 2**20 for each in value)
    ):
        raise fields.error(name, "two positive integers, such as [128, 128]", value)
    return value[0], value[1]


def check_patterns(fields: ConfigFields, name: str) -> None:
    """Check a list of layers that are, or are not, quantised: names, and patterns that begin with "re:".

    Which layers they are is seen from the types of their tensors.

    Raises:
        FileFormatError: it is not a list of strings, or a pattern does not compile.
    """
    value = fields.get(name)
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(name, "a list of names of layers", value)
    for each in value:
        if each.startswith("re:"):
            try:
                re.compile(each.removeprefix("re:"))
            except re.error as error:
                raise FileFormatError(f"{fields.where}: {name}: {each!r} is no pattern: {error}") from error
