"""The metadata keys of a GGUF file's architecture, checked."""

from collections.abc import Collection, Mapping

import numpy as np

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.models.config_fields import ConfigFields, words
from octavo.models.formats.gguf.architectures import GGUFArchitecture
from octavo.models.formats.gguf.file import GGUFFile

# Keys under "<architecture>." that are read.
_READ_KEYS = words(
    "block_count context_length embedding_length feed_forward_length expert_count expert_used_count",
    "expert_feed_forward_length attention.head_count attention.head_count_kv attention.key_length",
    "attention.value_length attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base",
    "rope.scaling.type rope.scaling.attn_factor rope.scaling.factor",
    "rope.scaling.original_context_length rope.scale_linear",
)
# The value names the order of rows; see GGUFArchitecture.tensor_layouts.
_LAYOUT_KEY = "tensor_data_layout"
# Keys that repeat what the tensors say, or do not affect the network.
_IGNORED_KEYS = frozenset({"vocab_size", "rope.scaling.finetuned"})
# Keys of which only these values are supported.
_NEUTRAL_KEYS: Mapping[str, tuple[object, ...]] = {
    "expert_shared_count": (0,),
    "pooling_type": (0, 1, 3),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    # With -1, llama.cpp takes the default of the kind of scaling.
    "rope.scaling.yarn_ext_factor": (-1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
}
# Keys whose value may be an array of one value per layer.
_LISTED_KEYS = frozenset({"attention.sliding_window_pattern"})
# Sizes that may be given per layer.
_SIZES_PER_LAYER = frozenset({"feed_forward_length", "attention.head_count", "attention.head_count_kv"})


class ArchitectureFields(ConfigFields):
    """The metadata keys under "<architecture>."; unknown keys are refused.

    Attributes:
        file: the file.
        architecture: its architecture.
    """

    def __init__(self, file: GGUFFile, architecture: GGUFArchitecture) -> None:
        """Check the keys.

        Raises:
            UnsupportedModelError: a key that changes the network is not supported.
            FileFormatError: an array stands where a single value belongs.
        """
        prefix = f"{architecture.name}."
        own = checked_values(file, prefix, _SIZES_PER_LAYER if architecture.has_layers_of_two_kinds else ())
        super().__init__(own, {}, where=f"{file.path.name}: {architecture.name}")
        self.file = file
        self.architecture = architecture
        known = {_LAYOUT_KEY} | _READ_KEYS | _IGNORED_KEYS | _NEUTRAL_KEYS.keys() | architecture.own_keys
        for key in own:
            if key not in known:
                raise UnsupportedModelError(
                    f"{self.where}: key {key!r} is not supported{suggest(key, known)}"
                )
        neutral = {key: values for key, values in _NEUTRAL_KEYS.items() if key not in architecture.own_keys}
        self.require_neutral({_LAYOUT_KEY: architecture.tensor_layouts, **neutral})

    def per_layer(self, name: str, default: int | None, num_layers: int) -> list[int]:
        """Return a size of each layer, which may be one for all, as positive integers.

        Raises:
            FileFormatError: there are fewer or more, or one is none.
        """
        value = self.get(name)
        if not isinstance(value, np.ndarray | list):
            return [self.integer(name, default)] * num_layers
        sizes = [int(size) for size in value] if getattr(value, "dtype", np.dtype("f4")).kind in "iu" else []
        if len(sizes) != num_layers or min(sizes) < 1:
            raise self.error(name, f"a positive integer, or one for each of {num_layers} layers", value)
        return sizes


def checked_values(file: GGUFFile, prefix: str, listed: Collection[str]) -> dict[str, object]:
    """Return the values under a prefix by the rest of their key; refuse arrays where they have no meaning.

    Args:
        file: the file.
        prefix: of the keys.
        listed: sizes that may differ between layers.
    """
    values = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    for key in _SIZES_PER_LAYER & values.keys():
        values[key] = _uniform(values[key])
    for key, value in values.items():
        if isinstance(value, np.ndarray | list) and key not in {*_LISTED_KEYS, *listed}:
            raise FileFormatError(
                f"{file.path.name}: expected {prefix}{key} to be a single value, got an array of {len(value)}"
            )
    return values


def _uniform(value: object) -> object:
    """Return the one size in an array of equal sizes; other values stay as they are and are refused later."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(set(value.tolist())) == 1:
        return int(value[0])
    return value
