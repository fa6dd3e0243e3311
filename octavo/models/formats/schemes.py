"""Finds the reader of a config.json's quantization_config.

To add a format: a file like float8.py, here or in integers/, with a Scheme and a function that reads its
fields, and a line in _METHODS, or in _FORMATS of compressed_tensors.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.auto_round import read_auto_round
from octavo.models.formats.compressed_tensors import read_compressed_tensors
from octavo.models.formats.float8_scheme import read_fp8
from octavo.models.formats.integers.awq import read_awq
from octavo.models.formats.integers.gptq import read_gptq
from octavo.models.formats.modelopt import read_modelopt
from octavo.models.formats.mxfp4 import read_mxfp4
from octavo.models.formats.quantised_tensors import QuantisedTensors
from octavo.models.weights import StoredTensors

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
