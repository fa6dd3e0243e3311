"""Translates GGUF metadata to the fields of a config.json."""

import reprlib
from collections.abc import Mapping

import numpy as np

from octavo.errors import FileFormatError, UnsupportedModelError, suggest
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.gguf.architectures import ROPE_FACTORS, GGUFArchitecture, find_architecture
from octavo.models.formats.gguf.file import GGUFFile

# Keys under "<architecture>." that are read below.
_READ_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scale_linear",
    }
)
# Keys that repeat what the tensors say, or do not affect the network.
_IGNORED_KEYS = frozenset({"vocab_size", "rope.scaling.finetuned"})
# Keys of which only these values are supported.
_NEUTRAL_KEYS: Mapping[str, tuple[object, ...]] = {
    "expert_shared_count": (0,),
    "pooling_type": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
}
# May be an array of one value per layer.
_LISTED_KEYS = frozenset({"attention.sliding_window_pattern"})
# Sizes that may be given per layer.
_SIZES_PER_LAYER = frozenset({"feed_forward_length", "attention.head_count", "attention.head_count_kv"})
_DEFAULT_THETA = 10_000.0


def gguf_to_hf_config(file: GGUFFile) -> dict[str, object]:
    """Return a GGUF file's metadata as a config.json.

    Divisors of the rotary frequencies (the tensor rope_freqs of Llama 3 models) become
    `"rope_scaling": {"rope_type": "factors", "factors": [...]}`. There is no "dtype": a quantised file has
    none.

    Args:
        file: the file; its tensors give the vocabulary size, the biases and whether embeddings are tied.

    Raises:
        UnsupportedModelError: the architecture, or a key that changes the network, is not supported.
        FileFormatError: a needed key is missing or of the wrong type.
    """
    # First: parts but the first say nothing else.
    if _checked_values(file, "split.").get("count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of several parts; merge them into one file, as with "
            "llama-gguf-split --merge"
        )
    architecture = find_architecture(file.metadata, file.path.name)
    fields = ArchitectureFields(file, architecture)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, max(1, hidden_size // num_heads))
    config: dict[str, object] = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", _DEFAULT_THETA),
        "rope_scaling": _rope_scaling(fields, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
        **_token_ids(fields),
    }
    return config | _attention_scale(fields, config) | _softcaps(fields) | _windows(fields) | _experts(fields)


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
        own = _checked_values(file, prefix)
        super().__init__(own, {}, where=f"{file.path.name}: {architecture.name}")
        self.file = file
        self.architecture = architecture
        known = _READ_KEYS | _IGNORED_KEYS | _NEUTRAL_KEYS.keys() | architecture.own_keys
        for key in own:
            if key not in known:
                raise UnsupportedModelError(
                    f"{self.where}: key {key!r} is not supported{suggest(key, known)}"
                )
        self.require_neutral(_NEUTRAL_KEYS)


def _checked_values(file: GGUFFile, prefix: str) -> dict[str, object]:
    """Return the values under a prefix by the rest of their key; refuse arrays where they have no meaning."""
    values = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    for key in _SIZES_PER_LAYER & values.keys():
        values[key] = _uniform(values[key])
    for key, value in values.items():
        if isinstance(value, np.ndarray | list) and key not in _LISTED_KEYS:
            raise FileFormatError(
                f"{file.path.name}: expected {prefix}{key} to be a single value, got an array of {len(value)}"
            )
    return values


def _uniform(value: object) -> object:
    """Return the one size in an array of equal sizes; other values stay as they are and are refused later."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(set(value.tolist())) == 1:
        return int(value[0])
    return value


def _head_dim(fields: ArchitectureFields, default: int) -> int:
    head_dim = fields.integer("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{fields.where}: {key} = {fields.get(key)} differs from the head dimension {head_dim}; "
                "partial rotary embeddings and values of another size than keys are not supported"
            )
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileFormatError(f"{file.path.name}: expected a tensor token_embd.weight of two dimensions")
    return embedding.shape[0]


def _token_ids(fields: ArchitectureFields) -> dict[str, object]:
    """Return the ids of BOS and of all ends of text; a missing one is None, not the family's default."""
    names = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
    bos, *ends = (_token_id(fields.file, f"tokenizer.ggml.{name}") for name in names)
    return {"bos_token_id": bos, "eos_token_id": sorted({end for end in ends if end is not None}) or None}


def _token_id(file: GGUFFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise FileFormatError(f"{file.path.name}: expected {key} to be a token id, got {reprlib.repr(value)}")
    return value


def _rope_scaling(fields: ArchitectureFields, head_dim: int) -> dict[str, object] | None:
    has_factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    kind = fields.get("rope.scaling.type", "linear" if has_factor else "none")
    if ROPE_FACTORS in fields.file.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{fields.where}: {ROPE_FACTORS} together with rope scaling {kind!r}")
        return {"rope_type": "factors", "factors": _rope_factors(fields.file, head_dim)}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.where}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn"
        )
    if kind == "linear" and fields.get("rope.scaling.factor") is None:
        return {"rope_type": kind, "factor": fields.number("rope.scale_linear")}
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        context = fields.integer("context_length")
        original = fields.integer("rope.scaling.original_context_length", context)
        scaling |= {"original_max_position_embeddings": original, **fields.architecture.yarn}
    return scaling


def _rope_factors(file: GGUFFile, head_dim: int) -> list[float]:
    info = file.tensors[ROPE_FACTORS]
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise FileFormatError(
            f"{file.path.name}: expected {ROPE_FACTORS} to be F32 of [{head_dim // 2}], "
            f"got {info.type.name} of {list(info.shape)}"
        )
    factors = file.raw(ROPE_FACTORS).view("<f4").tolist()
    file.close()
    return factors


def _attention_scale(fields: ArchitectureFields, config: Mapping[str, object]) -> dict[str, object]:
    """Return the number whose 1 / sqrt scales q.k; the file does not hold it."""
    wide_layers = fields.architecture.wide_layers
    if wide_layers is None:
        return {}
    is_wide = fields.integer("block_count") == wide_layers
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    return {"query_pre_attn_scalar": hidden_size // num_heads if is_wide else config["head_dim"]}


def _experts(fields: ArchitectureFields) -> dict[str, object]:
    """Return the fields of a mixture of experts; none where the file has no experts."""
    number = fields.integer("expert_count", 0, minimum=0)
    experts = fields.architecture.experts
    if experts is None or number == 0:
        fields.require_neutral({"expert_count": (0,), "expert_used_count": (0,)})
        return {}
    return {
        **experts.config,
        "architectures": [experts.hf_name],
        "model_type": experts.model_type,
        "num_experts": number,
        "num_experts_per_tok": fields.integer("expert_used_count"),
        experts.size_key: fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length")),
    }


def _softcaps(fields: ArchitectureFields) -> dict[str, object]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: fields.number(name) for name in names if fields.get(name) is not None}


def _windows(fields: ArchitectureFields) -> dict[str, object]:
    """Return the window, the layers that have it, and the rotary base of those layers."""
    own_keys = fields.architecture.own_keys
    window = fields.architecture.sliding_window
    if fields.get("attention.sliding_window") is not None:
        window = fields.integer("attention.sliding_window")
    windows: dict[str, object] = {"sliding_window": window}
    if window is not None and "attention.sliding_window_pattern" in own_keys:
        windows |= _sliding_layers(fields)
    if "rope.freq_base_swa" in own_keys:
        windows["rope_local_base_freq"] = fields.number("rope.freq_base_swa", _DEFAULT_THETA)
    return windows


def _sliding_layers(fields: ArchitectureFields) -> dict[str, object]:
    """Return which layers have the window: all but every n-th, or as listed."""
    pattern = fields.get("attention.sliding_window_pattern")
    num_layers = fields.integer("block_count")
    if isinstance(pattern, np.ndarray | list):
        if not isinstance(pattern, np.ndarray) or pattern.dtype.kind != "b" or len(pattern) != num_layers:
            raise FileFormatError(
                f"{fields.where}: expected attention.sliding_window_pattern to be a number, or true or "
                f"false for each of {num_layers} layers; got an array of {len(pattern)}"
            )
        names = ("full_attention", "sliding_attention")
        return {"layer_types": [names[bool(slides)] for slides in pattern]}
    return {"sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6)}
