"""Finds the reader of a config.json's quantization_config.

To add a format: a file like float8_scheme.py, here or in integers/, with a Scheme and a function that reads
its fields, and a line in _METHODS, or in _FORMATS of compressed_tensors. auto-round's own method has the
layouts of GPTQ, AWQ and float8 under other fields.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats.compressed_tensors import read_compressed_tensors
from octavo.models.formats.float4 import read_mxfp4
from octavo.models.formats.float8_scheme import read_fp8
from octavo.models.formats.integers.awq import read_awq
from octavo.models.formats.integers.gptq import read_gptq
from octavo.models.formats.matrix_schemes import MatrixScheme, MixedScheme
from octavo.models.formats.modelopt import read_modelopt
from octavo.models.formats.quantised_tensors import QuantisedTensors
from octavo.models.formats.scheme_fields import CALIBRATION
from octavo.models.weights import StoredTensors

_AUTO_ROUND_KEYS = CALIBRATION | words(
    "act_bits act_data_type act_dynamic act_group_size act_sym activation_scheme bits extra_config",
    "fmt group_size iters lr minmax_lr nsamples packing_format quant_method seqlen supported_types",
    "sym weight_block_size",
)
_NOT_QUANTISED = 16


def read_auto_round(fields: ConfigFields) -> MatrixScheme | MixedScheme:
    """Read quant_method "auto-round"; see schemes.read_scheme."""
    fields.require_known(_AUTO_ROUND_KEYS)
    fields.require_one_of("packing_format", tuple(_LAYOUTS))
    for layer, others in fields.mapping("extra_config").items():
        # Layers that are left as they are.
        if not isinstance(others, Mapping) or others.get("bits") not in (_NOT_QUANTISED, 32):
            raise UnsupportedModelError(
                f"{fields.where}: extra_config: {layer!r} = {others!r} is not supported"
            )
    read, method, names, types = _LAYOUTS[str(fields.get("packing_format"))]
    fields.require_one_of("data_type", types)
    if method != "fp8":
        fields.require_one_of("act_bits", (None, _NOT_QUANTISED, 32))
    present = {name: fields.get(name) for name in names if fields.get(name) is not None}
    return read(ConfigFields({"quant_method": method, **present}, {}, where=fields.where))


_FLOAT8 = (read_fp8, "fp8", ("activation_scheme", "fmt", "weight_block_size"), ("fp", "fp8", "fp8_e4m3"))
# packing_format -> the reader of its layout, the layout's quant_method, its fields, and types of numbers.
_LAYOUTS: Mapping[
    str,
    tuple[Callable[[ConfigFields], MatrixScheme | MixedScheme], str, tuple[str, ...], tuple[str | None, ...]],
] = MappingProxyType(
    {
        "auto_round:auto_awq": (read_awq, "awq", ("bits", "group_size", "sym"), ("int", None)),
        "auto_round:auto_gptq": (read_gptq, "gptq", ("bits", "group_size", "sym"), ("int", None)),
        "auto_round:fp8": _FLOAT8,
        "auto_round:fp8_static": _FLOAT8,
    }
)


_WHERE = "config.json: quantization_config"


class Scheme(Protocol):
    """How the matrices of a checkpoint are quantised."""

    def open(self, tensors: StoredTensors) -> QuantisedTensors:
        """Find the quantised matrices.

        Args:
            tensors: the checkpoint.

        Raises:
            WeightsError: scales are missing or of the wrong shape.
            UnsupportedModelError: a tensor's type is not supported.
        """
        ...


# quant_method -> reads the fields; None: no matrix is quantised.
_METHODS: Mapping[str, Callable[[ConfigFields], Scheme | None]] = MappingProxyType(
    {
        "auto-round": read_auto_round,
        "awq": read_awq,
        "compressed-tensors": read_compressed_tensors,
        "fp8": read_fp8,
        "gptq": read_gptq,
        "modelopt": read_modelopt,
        "mxfp4": read_mxfp4,
    }
)


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """Return how a config.json says that matrices are quantised, or None if they are not.

    Args:
        config: the parsed file.

    Raises:
        UnsupportedModelError: a method, or an option of it, that Octavo does not have; names it.
        FileFormatError: a field is missing or malformed.
    """
    value = config.get("quantization_config") or config.get("compression_config")
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise FileFormatError(f"{_WHERE} must be an object, got {value!r}")
    method = value.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModelError(
            f"{_WHERE}: quant_method {method!r} is not supported{suggest(str(method), _METHODS)}; "
            f"supported: {', '.join(_METHODS)}"
        )
    return _METHODS[method](ConfigFields(value, {}, where=_WHERE))
