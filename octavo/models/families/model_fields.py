"""What a config.json says of the whole network, and what of it no family here has."""

import math
from collections.abc import Sequence

from octavo.errors import UnsupportedModelError
from octavo.kernels.clamped_swiglu import LIMIT, NAME, SLOPE
from octavo.layers import RopeConfig
from octavo.models.config_fields import ConfigFields
from octavo.models.experts.experts_config import NUM_EXPERTS_KEYS
from octavo.models.families.family import Family
from octavo.models.formats.float4 import Mxfp4Scheme
from octavo.models.formats.schemes import Scheme

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Constants of gpt-oss's activation.
_SWIGLU_VALUES = {"swiglu_limit": (LIMIT,), "swiglu_alpha": (SLOPE,)}

# Keys of Granite's factors.
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_DRAFT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_SHARED_KEYS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
# Keys of unsupported features, and the values, besides null, that switch the feature off.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "moe_num_experts": (0,),
    **dict.fromkeys(_SHARED_KEYS, (0,)),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "attention_out_bias": (False,),
    "use_bias": (False,),
    "logit_scale": (1,),
    "clip_qkv": (),
    # Gemma 4's "vision" is for images alone.
    "use_bidirectional_attention": (False, "vision"),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "altup_num_inputs": (1,),
    "num_kv_shared_layers": (0,),
    "attention_k_eq_v": (False,),
    "per_layer_config": ({},),
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False,),
    "q_lora_rank": (),
    "kv_lora_rank": (),
}


def require_supported(fields: ConfigFields, family: Family) -> None:
    """Refuse keys of what the family does not have.

    Raises:
        UnsupportedModelError: names the key and its value.
    """
    neutral = _NEUTRAL_VALUES
    if family.experts is not None:
        known = {*NUM_EXPERTS_KEYS, family.experts.shared_key}
        neutral = {key: values for key, values in neutral.items() if key not in known}
    read = {"no_rope_layers": family.has_nope_layers, "partial_rotary_factor": family.has_partial_rotary}
    read |= dict.fromkeys(("attention_k_eq_v", "per_layer_config"), family.has_full_heads)
    read["num_kv_shared_layers"] = family.has_shared_caches
    read["hidden_size_per_layer_input"] = family.has_layer_inputs
    read["enable_moe_block"] = family.experts is not None and family.experts.dense_rule == "enable_moe_block"
    read |= dict.fromkeys(_MULTIPLIERS, family.has_multipliers) | {family.output_bias_key: True}
    fields.require_neutral({key: values for key, values in neutral.items() if not read.get(key)})


def read_draft_layers(fields: ConfigFields) -> int:
    """Return the number of layers that predict a token further."""
    return max(fields.integer(name, 0, minimum=0, maximum=64) for name in _DRAFT_KEYS)


def max_positions(fields: ConfigFields, ropes: Sequence[RopeConfig]) -> int:
    """Return the longest context in tokens, with YaRN's stretching."""
    stretched = [rope.factor * rope.original_max_positions for rope in ropes if rope.rope_type == "yarn"]
    if max(stretched, default=0.0) >= 2**31:
        raise fields.error("max_position_embeddings", "less than 2**31 with yarn's factor", max(stretched))
    return max(fields.integer("max_position_embeddings"), *map(int, stretched), 1)


def check_scheme(scheme: Scheme | None, family: Family) -> None:
    """Check that a family's checkpoints may be quantised so.

    Raises:
        UnsupportedModelError: MXFP4 is for the layout of gpt-oss's experts.
    """
    has_layout = family.experts is not None and family.experts.is_gpt_oss
    if isinstance(scheme, Mxfp4Scheme) and not has_layout:
        raise UnsupportedModelError(
            "config.json: quantization_config: quant_method 'mxfp4' is supported for the experts of "
            f"GptOssForCausalLM, not for {family.architecture}"
        )


def read_activation(fields: ConfigFields, family: Family) -> str:
    """Return the activation of the feed-forward gate; see ModelConfig."""
    key = family.activation_key
    name = fields.get(key) or family.defaults.get(key, "silu")
    if str(name) not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.where}: {key} = {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    if family.experts is None or not family.experts.is_gpt_oss:
        return _ACTIVATIONS[str(name)]
    fields.require_neutral({key: ("silu",), **_SWIGLU_VALUES})
    return NAME


def has_qk_norm(fields: ConfigFields, family: Family) -> bool:
    """Return whether queries and keys are normalised per head."""
    by_key = family.has_qk_norm
    return fields.boolean(by_key) if isinstance(by_key, str) else by_key


def multiplier(fields: ConfigFields, family: Family, name: str) -> float:
    """Return a factor that only some families have, else 1."""
    return fields.number(name, 1.0) if family.has_multipliers else 1.0


def embedding_multiplier(fields: ConfigFields, family: Family, hidden_size: int) -> float:
    """Return the factor of embeddings."""
    own = math.sqrt(hidden_size) if family.scales_embeddings else 1.0
    return own * multiplier(fields, family, "embedding_multiplier")


def layer_input(fields: ConfigFields, family: Family, name: str) -> int:
    """Return a size of the embeddings that layers have of tokens, 0 where they have none."""
    return fields.integer(name, 0, minimum=0) if family.has_layer_inputs else 0


def attention_scale(fields: ConfigFields, family: Family, head_dim: int) -> float:
    """Return the factor of q.k."""
    if family.attention_scale is not None:
        return family.attention_scale
    if family.has_multipliers:
        return multiplier(fields, family, "attention_multiplier")
    return (fields.number(family.attention_scale_key) if family.attention_scale_key else head_dim) ** -0.5


def softcap(fields: ConfigFields, name: str, *, allowed: bool) -> float:
    """Return a bound of scores or logits, 0 where there is none."""
    if not allowed:
        fields.require_neutral({name: ()})
        return 0.0
    return fields.optional_number(name) or 0.0


def read_token_id(fields: ConfigFields, name: str) -> int | None:
    """Return a token id, or None."""
    return None if fields.get(name) is None else fields.integer(name, minimum=0)


def read_eos_token_ids(fields: ConfigFields) -> frozenset[int]:
    """Return the ids that end a text."""
    value = fields.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    ids = [entry for entry in found if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0]
    if len(ids) != len(found):
        raise fields.error("eos_token_id", "a token id or a list of them", value)
    return frozenset(ids)


def read_dtype(fields: ConfigFields) -> str | None:
    """Return the type that the checkpoint was saved in, or None."""
    value = fields.get("dtype") or fields.get("torch_dtype")
    return str(value).removeprefix("torch.") if value is not None else None
