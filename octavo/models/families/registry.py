"""The table of families.

To add a family, add a Family here, or in `mixtures` if it has experts, and, for GGUF files, a
GGUFArchitecture in formats.gguf.architectures. A tensor that no other family has needs its shape in
`parameters` and its layer in `builder`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from octavo.errors import UnsupportedModelError, suggest
from octavo.models.families.family import ExpertFamily, Family
from octavo.models.families.mixtures import MIXTURES
from octavo.models.families.text_parts import PART_DEFAULTS, TEXT_PARTS, family_name, find_text_part

# Unsupported architectures that people ask for, and the part that is missing.
_MISSING: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for reason, names in (
            (
                "keys that are compressed into one latent row are not",
                "DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM "
                "Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM KimiK2ForCausalLM",
            ),
            (
                "several residual streams are not",
                "Gemma3nForCausalLM Gemma3nForConditionalGeneration",
            ),
            (
                "attention within chunks is not",
                "Llama4ForCausalLM Llama4ForConditionalGeneration",
            ),
            (
                "layers of linear attention are not",
                "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration "
                "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration",
            ),
            (
                "state spaces and convolutions in place of attention are not",
                "FalconH1ForCausalLM FalconMambaForCausalLM JambaForCausalLM Lfm2ForCausalLM "
                "Mamba2ForCausalLM MambaForCausalLM",
            ),
            (
                "norms that subtract the mean are not",
                "BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM DbrxForCausalLM FalconForCausalLM "
                "GPT2LMHeadModel GPTJForCausalLM GPTNeoXForCausalLM MptForCausalLM NemotronForCausalLM "
                "OPTForCausalLM PhiForCausalLM StableLmForCausalLM Starcoder2ForCausalLM",
            ),
            (
                "images are not; a checkpoint of the text model alone is, where its family is listed",
                "LlavaNextForConditionalGeneration MllamaForConditionalGeneration Phi4MMForCausalLM",
            ),
        )
        for name in names.split()
    }
)

# Names of the same networks with another head, or with none.
_OTHER_HEAD = re.compile(r"(Text)?(Model|ForSequenceClassification)$")

# How similar a name must be to be suggested: high, because all names end alike.
_LIKENESS = 0.85

_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    window_rule="all_but_every_nth",
    has_post_norms=True,
    norm_weight_offset=1.0,
    scales_embeddings=True,
    attention_scale_key="query_pre_attn_scalar",
    activation_key="hidden_activation",
    has_attention_softcap=True,
    has_final_softcap=True,
    defaults=_GEMMA_DEFAULTS
    | {
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)

_GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    window_rule="all_but_every_nth_and_last",
    has_qk_norm=True,
    has_value_norm=True,
    has_post_norms=True,
    has_full_heads=True,
    has_shared_caches=True,
    has_layer_inputs=True,
    has_layer_scales=True,
    scales_embeddings=True,
    attention_scale=1.0,
    activation_key="hidden_activation",
    has_final_softcap=True,
    has_local_rope=True,
    experts=ExpertFamily(
        chosen_key="top_k_experts",
        size_key="moe_intermediate_size",
        renormalises=True,
        dense_rule="enable_moe_block",
        is_beside_dense=True,
    ),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "num_experts": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)

_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    has_wide_qk_norm=True,
    has_pre_norms=False,
    has_post_norms=True,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
)

_MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    window_rule="always",
    attention_bias="never",
    defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)

_MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family(
                architecture="LlamaForCausalLM",
                model_type="llama",
                has_mlp_bias_option=True,
                defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
            ),
            _MISTRAL,
            replace(
                _MISTRAL,
                architecture="Ministral3ForCausalLM",
                model_type="ministral3",
                has_query_growth=True,
                defaults={
                    **_MISTRAL.defaults,
                    "head_dim": 128,
                    "sliding_window": None,
                    "max_position_embeddings": 262144,
                    "rms_norm_eps": 1e-5,
                    "rope_parameters": _MINISTRAL_ROPE,
                },
            ),
            Family(
                architecture="Qwen2ForCausalLM",
                model_type="qwen2",
                window_rule="after_max_window_layers",
                attention_bias="qkv",
                defaults=_QWEN_DEFAULTS,
            ),
            Family(
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                window_rule="after_max_window_layers",
                has_qk_norm=True,
                defaults=_QWEN_DEFAULTS | {"head_dim": 128},
            ),
            Family(
                architecture="Phi3ForCausalLM",
                model_type="phi3",
                window_rule="always",
                attention_bias="never",
                has_partial_rotary=True,
                has_fused_projections=True,
                defaults={
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-5,
                    "bos_token_id": 1,
                    "eos_token_id": 32000,
                },
            ),
            Family(
                architecture="SmolLM3ForCausalLM",
                model_type="smollm3",
                window_rule="without_rope",
                has_mlp_bias_option=True,
                has_nope_layers=True,
                defaults={
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32768,
                    "rope_theta": 2_000_000.0,
                    "no_rope_layer_interval": 4,
                    "tie_word_embeddings": True,
                    "bos_token_id": 128000,
                    "eos_token_id": 128001,
                },
            ),
            _OLMO2,
            replace(
                _OLMO2,
                architecture="Olmo3ForCausalLM",
                model_type="olmo3",
                window_rule="all_but_every_nth",
                has_local_rope=True,
                defaults={
                    **_OLMO2.defaults,
                    "sliding_window": 4096,
                    "sliding_window_pattern": 4,
                    "rope_theta": 500_000.0,
                },
            ),
            Family(
                architecture="Exaone4ForCausalLM",
                model_type="exaone4",
                window_rule="all_but_every_nth",
                attention_bias="never",
                has_qk_norm=True,
                has_pre_norms=False,
                has_post_norms=True,
                has_nope_full_layers=True,
                defaults={
                    "sliding_window": 4096,
                    "sliding_window_pattern": 4,
                    "num_key_value_heads": 32,
                    "max_position_embeddings": 2048,
                    "rms_norm_eps": 1e-5,
                    "bos_token_id": 0,
                    "eos_token_id": 2,
                },
            ),
            Family(
                architecture="GraniteForCausalLM",
                model_type="granite",
                has_mlp_bias_option=True,
                has_multipliers=True,
                defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
            ),
            Family(
                architecture="SeedOssForCausalLM",
                model_type="seed_oss",
                has_mlp_bias_option=True,
                output_bias_key="attention_out_bias",
                defaults={
                    "head_dim": 128,
                    "num_key_value_heads": 8,
                    "attention_bias": True,
                    "max_position_embeddings": 524288,
                    "bos_token_id": 0,
                    "eos_token_id": 2,
                },
            ),
            _GEMMA2,
            replace(
                _GEMMA2,
                architecture="Gemma3ForCausalLM",
                model_type="gemma3_text",
                has_qk_norm=True,
                has_attention_softcap=False,
                has_local_rope=True,
                defaults=_GEMMA_DEFAULTS
                | {
                    "vocab_size": 262208,
                    "num_attention_heads": 8,
                    "num_key_value_heads": 4,
                    "sliding_window_pattern": 6,
                    "max_position_embeddings": 131072,
                    "rope_theta": 1_000_000.0,
                    "rope_local_base_freq": 10_000.0,
                },
            ),
            _GEMMA4,
            replace(
                _GEMMA4,
                architecture="Gemma4UnifiedForCausalLM",
                model_type="gemma4_unified_text",
                has_layer_inputs=False,
                experts=None,
                defaults={
                    **_GEMMA4.defaults,
                    "sliding_window": 1024,
                    "max_position_embeddings": 262144,
                },
            ),
            *MIXTURES,
        )
    }
)


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json, by its architectures or, if it names none, its model_type.

    That of a checkpoint which also reads images is the family of its text model, under its own name.

    Raises:
        UnsupportedModelError: none of them is supported; the message lists what is.
    """
    whole = find_text_part(config)
    if whole is not None:
        family = FAMILIES[family_name(whole, config)]
        defaults = {**family.defaults, **PART_DEFAULTS.get(whole, {})}
        return replace(family, architecture=whole, defaults=defaults)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        name = _OTHER_HEAD.sub("ForCausalLM", str(architectures[0]))
        name = name if name in FAMILIES else architectures[0]
        return _pick("architecture", name, lambda family: family.architecture)
    return _pick("model_type", config.get("model_type"), lambda family: family.model_type)


def _pick(what: str, value: object, name_of: Callable[[Family], str]) -> Family:
    families = {name_of(family): family for family in FAMILIES.values()}
    if isinstance(value, str) and value in families:
        return families[value]
    known = [*families, *(TEXT_PARTS if what == "architecture" else ())]
    if isinstance(value, str) and value in _MISSING:
        raise UnsupportedModelError(
            f"{what} {value!r} is not supported: {_MISSING[value]}; supported: {', '.join(known)}"
        )
    raise UnsupportedModelError(
        f"{what} {value!r} is not supported{suggest(str(value), known, _LIKENESS)}; "
        f"supported: {', '.join(known)}"
    )
