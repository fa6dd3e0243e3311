"""Checkpoints of auto-round in its own method: the layouts of GPTQ, AWQ and float8 under other fields."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.errors import UnsupportedModelError
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.float8_scheme import read_fp8
from octavo.models.formats.integers.awq import read_awq
from octavo.models.formats.integers.gptq import read_gptq
from octavo.models.formats.matrix_schemes import MatrixScheme, MixedScheme
from octavo.models.formats.scheme_fields import CALIBRATION, words

_KEYS = CALIBRATION | words(
    "act_bits act_data_type act_dynamic act_group_size act_sym activation_scheme bits extra_config",
    "fmt group_size iters lr minmax_lr nsamples packing_format quant_method seqlen supported_types",
    "sym weight_block_size",
)
_NOT_QUANTISED = 16


def read_auto_round(fields: ConfigFields) -> MatrixScheme | MixedScheme:
    """Read quant_method "auto-round"; see schemes.read_scheme."""
    fields.require_known(_KEYS)
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
    given = {name: fields.get(name) for name in names if fields.get(name) is not None}
    return read(ConfigFields({"quant_method": method, **given}, {}, where=fields.where))


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
