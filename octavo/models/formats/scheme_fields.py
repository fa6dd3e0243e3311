"""Fields that the quantization_configs of several formats have."""

import re

from octavo.errors import FileFormatError
from octavo.models.config_fields import ConfigFields, words

_CACHE = "kv_cache_scheme"


# Fields that say how tools of AutoGPTQ's family quantised a model; no stored number depends on them any more.
# transformers 5 writes all of them, for AWQ, too; auto-round has its own.
CALIBRATION = words(
    "act_group_aware autoround_version backend batch_size block_name_to_quantize cache_block_outputs",
    "damp_auto_increment damp_percent data_type dataset enable_quanted_input exllama_config",
    "max_input_length meta model_seqlen module_name_preceding_first_block",
    "modules_in_block_to_quantize pad_token_id provider static_attention_granularity",
    "static_kv_granularity to_quant_block_names tokenizer true_sequential",
)

# Fields by which compressed-tensors describes weights, activations or a cache.
ARGUMENTS = words(
    "actorder block_structure dynamic group_size is_mse num_bits observer observer_kwargs scale_dtype",
    "strategy symmetric type zp_dtype",
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


def read_group_size(fields: ConfigFields) -> int:
    """Return group_size: columns, or -1 for all.

    Raises:
        FileFormatError: it is missing, or something else.
    """
    value = fields.get("group_size")
    return -1 if type(value) is int and value == -1 else fields.integer("group_size", maximum=2**20)


def check_cache(fields: ConfigFields) -> None:
    """Check that kv_cache_scheme, if there is one, is of a float8 cache, whose scales a checkpoint may have.

    Raises:
        UnsupportedModelError: it is of another cache.
        FileFormatError: it is no object.
    """
    scheme = ConfigFields(fields.mapping(_CACHE), {}, where=f"{fields.where}: {_CACHE}")
    if fields.get(_CACHE) is not None:
        scheme.require_known(ARGUMENTS)
        scheme.require_one_of("type", ("float",))
        scheme.require_one_of("num_bits", (8,))
        scheme.require_one_of("dynamic", (False, None))


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
            except (re.error, OverflowError, RecursionError) as error:
                raise FileFormatError(f"{fields.where}: {name}: {each!r} is no pattern: {error}") from error
