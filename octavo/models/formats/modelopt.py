"""Reads the quantization_config of NVIDIA's ModelOpt: an algorithm, or one for each layer.

    FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, FP8_PB_REAL, MXFP8               formats.float8_scheme
    W8A8_SQ_PER_CHANNEL, W8A16                                                  integers.int_quantized
    W4A16_AWQ, W4A8_AWQ                                                         integers.paired_rows
    NVFP4, W4A16_NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8, MXFP4, W4A8_MXFP4_FP8        formats.float4

Which layers are quantised, and the sizes of groups, are seen from their tensors. AWQ and SmoothQuant leave
scales of inputs: formats.matrix_schemes.
"""

from collections.abc import Mapping
from types import MappingProxyType

from octavo.errors import UnsupportedModelError, suggest
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats import float4
from octavo.models.formats.float4 import Float4Scheme
from octavo.models.formats.float8_scheme import MXFP8, Float8Scheme
from octavo.models.formats.integers.int_quantized import IntQuantizedScheme
from octavo.models.formats.integers.paired_rows import PairedRowsScheme
from octavo.models.formats.matrix_schemes import MatrixScheme, MixedScheme
from octavo.models.formats.scheme_fields import check_cache, check_patterns

_KEYS = words(
    "config_groups exclude_modules group_size has_zero_point ignore kv_cache_quant_algo",
    "kv_cache_scheme pre_quant_scale producer quant_algo quant_method quantized_layers",
)
_MIXED = "MIXED_PRECISION"
_CACHE = "kv_cache_quant_algo"
_FLOAT8 = Float8Scheme("weight_scale", None, has_input_scales=False)
_TILES = Float8Scheme("weight_scale", (128, 128), has_input_scales=False)
_INT8 = IntQuantizedScheme(8, -1, is_symmetric=True, has_one_scale=False)
_NVFP4, _MXFP4 = (Float4Scheme(float4.MODELOPT, is_nv=is_nv) for is_nv in (True, False))
# Keys are names in config.json, in capitals; the tool writes some of them in small letters.
_ALGORITHMS: Mapping[str, MatrixScheme] = MappingProxyType(
    {
        "FP8": _FLOAT8,
        "FP8_PB_REAL": _TILES,
        "FP8_PB_WO": _TILES,
        "FP8_PER_CHANNEL_PER_TOKEN": _FLOAT8,
        "MXFP4": _MXFP4,
        "MXFP8": MXFP8,
        "NVFP4": _NVFP4,
        "NVFP4_AWQ": _NVFP4,
        "W4A16_AWQ": PairedRowsScheme(),
        "W4A16_NVFP4": _NVFP4,
        "W4A8_AWQ": PairedRowsScheme(),
        "W4A8_MXFP4_FP8": _MXFP4,
        "W4A8_NVFP4_FP8": _NVFP4,
        "W8A16": _INT8,
        "W8A8_SQ_PER_CHANNEL": _INT8,
    }
)


def read_modelopt(fields: ConfigFields) -> MatrixScheme | MixedScheme:
    """Read quant_method "modelopt"; see schemes.read_scheme."""
    fields.require_known(_KEYS)
    fields.require_one_of("has_zero_point", (False, None))
    for name in ("exclude_modules", "ignore"):
        check_patterns(fields, name)
    has_cache = _check_cache(fields)
    algorithm = fields.get("quant_algo")
    if algorithm is None and has_cache:
        # Only the cache is quantised.
        return MixedScheme(())
    if algorithm == _MIXED:
        return _read_layers(fields)
    return _scheme(fields, "quant_algo", algorithm)


def _check_cache(fields: ConfigFields) -> bool:
    """Check that a quantised KV cache, if there is one, is of float8; return whether there is."""
    fields.require_one_of(_CACHE, ("FP8", None))
    if isinstance(fields.get("kv_cache_scheme"), str):
        fields.require_one_of("kv_cache_scheme", ("FP8",))
    else:
        check_cache(fields)
    return bool(fields.get(_CACHE) or fields.get("kv_cache_scheme"))


def _read_layers(fields: ConfigFields) -> MixedScheme:
    """Return the schemes of all layers, each of them once."""
    schemes: list[MatrixScheme] = []
    for layer, settings in fields.mapping("quantized_layers").items():
        name = f"quantized_layers: {layer}"
        if not isinstance(settings, Mapping):
            raise fields.error(name, "an object", settings)
        inner = ConfigFields(settings, {}, where=f"{fields.where}: {name}")
        inner.require_one_of("has_zero_point", (False, None))
        scheme = _scheme(inner, "quant_algo", inner.get("quant_algo"))
        if scheme not in schemes:
            schemes.append(scheme)
    if not schemes:
        raise fields.error("quantized_layers", "an object of layers", fields.get("quantized_layers"))
    return MixedScheme(schemes)


def _scheme(fields: ConfigFields, name: str, algorithm: object) -> MatrixScheme:
    found = _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if found is None:
        raise UnsupportedModelError(
            f"{fields.where}: {name} = {algorithm!r} is not supported"
            f"{suggest(str(algorithm), _ALGORITHMS)}; supported: {', '.join((*_ALGORITHMS, _MIXED))}"
        )
    return found
