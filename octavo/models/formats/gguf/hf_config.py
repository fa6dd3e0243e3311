"""Translates GGUF metadata to the fields of a config.json."""

import reprlib
from collections.abc import Mapping

import numpy as np

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.models.formats.gguf.architectures import (
    GROWTH_KEY,
    LONG_FACTORS,
    MULTIPLIERS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    find_architecture,
)
from octavo.models.formats.gguf.fields import ArchitectureFields
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.two_kinds import two_kinds

_DEFAULT_THETA = 10_000.0
_DRAFT_KEY = "nextn_predict_layers"
# Keys of a config.json -> the keys of a file that say the same of experts.
_EXPERT_FIELDS = {
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), "leading_dense_block_count"),
    "moe_layer_interval": "interleave_moe_layer_step",
}


def gguf_to_hf_config(file: GGUFFile) -> dict[str, object]:
    """Return a GGUF file's metadata as a config.json.

    Divisors of the rotary frequencies (the tensor rope_freqs of Llama 3 models) become
    `"rope_scaling": {"rope_type": "factors", "factors": [...]}`, the two tensors of Phi-3's LongRoPE its
    long_factor and short_factor. There is no "dtype": a quantised file has none.

    Args:
        file: the file; its tensors give the vocabulary size, the biases and whether embeddings are tied.

    Raises:
        UnsupportedModelError: the architecture, or a key that changes the network, is not supported.
        FileFormatError: a needed key is missing or of the wrong type.
    """
    architecture = find_architecture(file.metadata, file.path.name)
    fields = ArchitectureFields(file, architecture)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields, max(1, hidden_size // num_heads))
    rotary_dim = read_rotary_dim(fields, head_dim)
    count = num_layers(fields)
    config: dict[str, object] = {
        "architectures": [architecture.hf_name],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": fields.per_layer("feed_forward_length", None, count)[0],
        "num_hidden_layers": count,
        "num_nextn_predict_layers": fields.integer(_DRAFT_KEY, 0, minimum=0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(fields.per_layer("attention.head_count_kv", num_heads, count)),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", _DEFAULT_THETA),
        "rope_scaling": read_rope_scaling(fields, rotary_dim),
        "partial_rotary_factor": rotary_dim / head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **dict.fromkeys(("attention_bias", "qkv_bias"), "blk.0.attn_q.bias" in file.tensors),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
        **_token_ids(fields),
    }
    config |= _attention_scale(fields, config) | _softcaps(fields) | _multipliers(fields)
    config |= _windows(fields) | _experts(fields) | _growth(fields, config)
    return config | (two_kinds(fields, config) if architecture.has_layers_of_two_kinds else {})


def num_layers(fields: ArchitectureFields) -> int:
    """Return the number of layers, without those that predict a token further."""
    return fields.integer("block_count") - fields.integer(_DRAFT_KEY, 0, minimum=0)


def _growth(fields: ArchitectureFields, config: Mapping[str, object]) -> dict[str, object]:
    """Return what Ministral 3 says beside Mistral Small 3: by how much queries grow with their position."""
    scaling = config["rope_scaling"]
    if fields.optional_number(GROWTH_KEY) is None:
        fields.require_neutral({"rope.scaling.yarn_log_multiplier": (0,)})
        return {}
    if not isinstance(scaling, dict) or scaling["rope_type"] != "yarn":
        raise UnsupportedModelError(f"{fields.where}: {GROWTH_KEY} is supported with rope scaling yarn only")
    same = dict.fromkeys(("mscale", "mscale_all_dim"), fields.number("rope.scaling.yarn_log_multiplier", 1.0))
    scaling |= {"llama_4_scaling_beta": fields.number(GROWTH_KEY), **same}
    return {"architectures": ["Ministral3ForCausalLM"]}


def _head_dim(fields: ArchitectureFields, default: int) -> int:
    head_dim = fields.integer("attention.key_length", default)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.where}: attention.value_length = {value_dim} differs from the head dimension "
            f"{head_dim}; values of another size than keys are not supported"
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
    if experts is not None and experts.may_be_dense and number == 0:
        return {"num_experts": 0}
    if experts is None or number == 0:
        fields.require_neutral({"expert_count": (0,), "expert_used_count": (0,)})
        return {}
    fields.require_neutral({"expert_gating_func": (0, 2 if experts.is_sigmoid else 1)})
    size = fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length"))
    config = {
        **experts.config,
        **(_dense_layers(fields) if experts.may_be_dense else {}),
        "architectures": [experts.hf_name or fields.architecture.hf_name],
        "num_experts": number,
        experts.chosen_key: fields.integer("expert_used_count"),
        experts.size_key: size,
        **{key: fields.get(name) for key, name in _EXPERT_FIELDS.items() if fields.get(name) is not None},
    }
    if experts.scaling_key is not None:
        config[experts.scaling_key] = fields.number("expert_weights_scale", 1.0)
    if experts.shared_key is not None:
        tensors = fields.file.tensors.items()
        width = next((each.shape[0] for name, each in tensors if name.endswith("_gate_shexp.weight")), 0)
        config[experts.shared_key] = width if experts.shared_key.endswith("size") else width // size
    return config


def _dense_layers(fields: ArchitectureFields) -> dict[str, object]:
    """Return which layers have a feed-forward: the file has no key for them, but its tensors show it."""
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers(fields))]
    return {
        "mlp_only_layers": [layer for layer, name in enumerate(routers) if name not in fields.file.tensors]
    }


def _softcaps(fields: ArchitectureFields) -> dict[str, object]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: fields.number(name) for name in names if fields.get(name) is not None}


def _multipliers(fields: ArchitectureFields) -> dict[str, object]:
    known = fields.architecture.own_keys & MULTIPLIERS.keys()
    return {MULTIPLIERS[key]: fields.number(key) for key in known if fields.get(key)}


def _windows(fields: ArchitectureFields) -> dict[str, object]:
    """Return the window, the layers that have it, and the rotary base of those layers."""
    own_keys = fields.architecture.own_keys
    window = fields.architecture.sliding_window
    if fields.get("attention.sliding_window") is not None:
        # 0 means none: Phi-4 has no window, other models of its architecture have one.
        window = fields.integer("attention.sliding_window", minimum=0) or None
    windows: dict[str, object] = {"sliding_window": window}
    if window is not None and "attention.sliding_window_pattern" in own_keys:
        windows |= _sliding_layers(fields)
    if "rope.freq_base_swa" in own_keys:
        windows["rope_local_base_freq"] = fields.number("rope.freq_base_swa", _DEFAULT_THETA)
    return windows


def _sliding_layers(fields: ArchitectureFields) -> dict[str, object]:
    """Return which layers have the window: all but every n-th, or as listed."""
    pattern = fields.get("attention.sliding_window_pattern")
    count = fields.integer("block_count")
    if isinstance(pattern, np.ndarray | list):
        if not isinstance(pattern, np.ndarray) or pattern.dtype.kind != "b" or len(pattern) != count:
            raise FileFormatError(
                f"{fields.where}: expected attention.sliding_window_pattern to be a number, or true or "
                f"false for each of {count} layers; got an array of {len(pattern)}"
            )
        names = ("full_attention", "sliding_attention")
        return {"layer_types": [names[bool(slides)] for slides in pattern]}
    return {"sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6)}


def read_rotary_dim(fields: ArchitectureFields, head_dim: int) -> int:
    """Return how many dimensions of a head, the first ones, are rotated.

    Raises:
        UnsupportedModelError: not all, in an architecture where all do.
        FileFormatError: more than a head has.
    """
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not fields.architecture.has_partial_rotary:
        raise UnsupportedModelError(
            f"{fields.where}: rope.dimension_count = {rotary_dim} differs from the head dimension "
            f"{head_dim}; partial rotary embeddings are not supported for this architecture"
        )
    if rotary_dim > head_dim:
        raise fields.error("rope.dimension_count", f"at most the head dimension {head_dim}", rotary_dim)
    return rotary_dim


def read_rope_scaling(fields: ArchitectureFields, rotary_dim: int) -> dict[str, object] | None:
    """Return rope_scaling, or None where frequencies are as trained.

    Raises:
        UnsupportedModelError: it is of a kind that Octavo does not have, or of two kinds.
        FileFormatError: a value or a tensor is missing or malformed.
    """
    tensors = fields.file.tensors
    if fields.architecture.has_long_rope and (LONG_FACTORS in tensors or SHORT_FACTORS in tensors):
        return _long_rope(fields, rotary_dim)
    fields.require_neutral({"rope.scaling.attn_factor": (1,)})
    has_factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    kind = fields.get("rope.scaling.type", "linear" if has_factor else "none")
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{fields.where}: {ROPE_FACTORS} together with rope scaling {kind!r}")
        return {"rope_type": "factors", "factors": _factors(fields, ROPE_FACTORS, rotary_dim)}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        needed = f" without {LONG_FACTORS}" if fields.architecture.has_long_rope else ""
        raise UnsupportedModelError(
            f"{fields.where}: rope.scaling.type {kind!r} is not supported{needed}; "
            "supported: none, linear, yarn"
        )
    if kind == "linear" and fields.get("rope.scaling.factor") is None:
        return {"rope_type": kind, "factor": fields.number("rope.scale_linear")}
    scaling: dict[str, object] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": _original_context(fields), **fields.architecture.yarn}
    return scaling


def _long_rope(fields: ArchitectureFields, rotary_dim: int) -> dict[str, object]:
    """Return LongRoPE's factors; no other scaling may stand beside them."""
    fields.require_neutral(
        {
            "rope.scaling.type": ("longrope", "none"),
            "rope.scaling.factor": (0, 1),
            "rope.scale_linear": (0, 1),
        }
    )
    return {
        "rope_type": "longrope",
        "long_factor": _factors(fields, LONG_FACTORS, rotary_dim),
        "short_factor": _factors(fields, SHORT_FACTORS, rotary_dim),
        "original_max_position_embeddings": _original_context(fields),
        "attention_factor": fields.number("rope.scaling.attn_factor"),
    }


def _original_context(fields: ArchitectureFields) -> int:
    return fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))


def _factors(fields: ArchitectureFields, name: str, rotary_dim: int) -> list[float]:
    file = fields.file
    info = file.tensors.get(name)
    if info is None or info.type.name != "F32" or info.shape != (rotary_dim // 2,):
        found = "none" if info is None else f"{info.type.name} of {list(info.shape)}"
        raise FileFormatError(
            f"{file.path.name}: expected a tensor {name}, F32 of [{rotary_dim // 2}], got {found}"
        )
    factors = file.raw(name).view("<f4").tolist()
    file.close()
    return factors
