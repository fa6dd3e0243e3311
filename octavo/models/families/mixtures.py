"""Families whose layers are mixtures of experts, a row each; see registry."""

from dataclasses import replace

from octavo.models.families.family import ExpertFamily, Family

_GPT_OSS_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}

_GRANITE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    has_multipliers=True,
    experts=ExpertFamily(number_key="num_local_experts", renormalises=True),
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
_GRANITE_SHARED = ExpertFamily(
    number_key="num_local_experts", renormalises=True, shared_key="shared_intermediate_size"
)

MIXTURES: tuple[Family, ...] = (
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        window_rule="when_used",
        has_qk_norm=True,
        experts=ExpertFamily(size_key="moe_intermediate_size", dense_rule="sparse_step"),
        defaults={"sliding_window": 4096, "max_position_embeddings": 32768},
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        window_rule="when_used",
        attention_bias="qkv_by_config",
        bias_key="qkv_bias",
        experts=ExpertFamily(
            size_key="moe_intermediate_size",
            dense_rule="sparse_step",
            shared_key="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        defaults={
            "qkv_bias": True,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        attention_bias="qkv_by_config",
        has_qk_norm="use_qk_norm",
        has_partial_rotary=True,
        experts=ExpertFamily(
            number_key="n_routed_experts",
            size_key="moe_intermediate_size",
            dense_rule="first_k_dense_replace",
            is_sigmoid=True,
            has_choice_bias=True,
            has_groups=True,
            scaling_key="routed_scaling_factor",
            shared_key="n_shared_experts",
        ),
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        attention_bias="never",
        has_wide_qk_norm=True,
        has_partial_rotary=True,
        experts=ExpertFamily(
            number_key="num_local_experts",
            renormalises=True,
            is_sigmoid=True,
            has_choice_bias=True,
        ),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 196608,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
        },
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        attention_bias="never",
        rotates_pairs=True,
        experts=ExpertFamily(
            number_key="moe_num_experts",
            chosen_key="moe_k",
            size_key="moe_intermediate_size",
            renormalises=True,
            dense_rule="moe_layer_interval",
            has_choice_bias=True,
            has_float32_router=True,
            shared_key="moe_num_shared_experts",
        ),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="HYV3ForCausalLM",
        model_type="hy_v3",
        has_qk_norm=True,
        has_mlp_bias_option=True,
        experts=ExpertFamily(
            size_key="moe_intermediate_size",
            renormalises=True,
            dense_rule="mlp_layer_types",
            is_sigmoid=True,
            has_choice_bias=True,
            scaling_key="router_scaling_factor",
            shared_key="num_shared_experts",
        ),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
        },
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        window_rule="always",
        attention_bias="never",
        experts=ExpertFamily(number_key="num_local_experts", renormalises=True),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        has_wide_qk_norm=True,
        experts=ExpertFamily(),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    _GRANITE,
    replace(
        _GRANITE,
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        experts=_GRANITE_SHARED,
    ),
    # Granite 4 without state spaces, and perhaps without experts.
    replace(
        _GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        rope_key="position_embedding_type",
        dense_size_key="shared_intermediate_size",
        experts=replace(_GRANITE_SHARED, dense_rule="all_or_none"),
        defaults={**_GRANITE.defaults, "shared_intermediate_size": 1024, "layer_types": ["mamba"]},
    ),
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        window_rule="all_but_every_nth",
        has_sinks=True,
        experts=ExpertFamily(number_key="num_local_experts", renormalises=True, is_gpt_oss=True),
        defaults=_GPT_OSS_DEFAULTS,
    ),
)
