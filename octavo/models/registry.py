"""The families of decoders as data: how they differ, and the defaults that their configs leave out.

To add a family, add a Family here and, for GGUF files, a GGUFArchitecture in formats.gguf.architectures. A
tensor that no other family has needs its shape in `parameters` and its layer in `builder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from octavo.errors import UnsupportedModelError, suggest

# How a family decides which layers slide when its config has no layer_types.
WindowRule = Literal[
    "never", "always", "when_used", "after_max_window_layers", "all_but_every_nth", "without_rope"
]
# Which of the q, k, v and output projections have a bias.
BiasRule = Literal["never", "qkv", "by_config"]
# Architectures that people ask for, and what of them is missing here.
_MISSING: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for reason, names in (
            (
                "experts that all tokens share are not",
                (
                    "DeepseekForCausalLM",
                    "DeepseekV2ForCausalLM",
                    "DeepseekV3ForCausalLM",
                    "DeepseekV32ForCausalLM",
                    "Ernie4_5_MoeForCausalLM",
                    "Glm4MoeForCausalLM",
                    "Llama4ForCausalLM",
                    "Llama4ForConditionalGeneration",
                    "Qwen2MoeForCausalLM",
                    "Qwen3NextForCausalLM",
                ),
            ),
            (
                "layers of linear attention are not",
                ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            ),
            (
                "blocks without a norm of their input are not",
                ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM"),
            ),
            (
                "factors of residual sums and logits are not",
                ("GraniteForCausalLM", "GraniteMoeForCausalLM"),
            ),
        )
        for name in names
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFamily:
    """The mixtures of experts of an architecture.

    Attributes:
        number_key: key of the number of experts of a layer.
        size_key: key of the width of an expert's feed-forward.
        renormalises: a token's router weights are divided by their sum; None: by norm_topk_prob.
        has_dense_layers: config.json may give layers a feed-forward instead (decoder_sparse_step,
            mlp_only_layers).
        has_bias: the router and the experts have biases, the experts' activation is "clamped_swiglu", and
            checkpoints have them in gpt-oss's layout.
    """

    number_key: str = "num_experts"
    size_key: str = "intermediate_size"
    renormalises: bool | None = None
    has_dense_layers: bool = False
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its name in config.json.
        model_type: model_type of its config.json.
        window_rule: which layers have a sliding window.
        attention_bias: which attention projections have a bias.
        has_mlp_bias_option: config.json may switch feed-forward biases on (mlp_bias).
        has_qk_norm: queries and keys are normalised per head.
        has_wide_qk_norm: queries are normalised over all heads, and keys likewise.
        has_post_norms: attention and feed-forward outputs are normalised before the residual sum.
        norm_weight_offset: added to stored norm weights; 1 where weight - 1 is stored.
        scales_embeddings: embeddings are multiplied by sqrt(hidden size).
        attention_scale_key: key of the number whose 1 / sqrt scales q.k; None: the head dimension.
        activation_key: key that names the feed-forward activation; Gemma ignores its own hidden_act.
        has_attention_softcap: config.json may bound attention scores.
        has_final_softcap: config.json may bound logits.
        has_local_rope: sliding layers have rotary frequencies of their own.
        has_nope_layers: some layers do not rotate queries and keys (no_rope_layers).
        has_fused_projections: checkpoints store q, k and v in one matrix, and gate and up in one.
        has_sinks: each query head sees one more key, whose score is a weight and whose value is 0.
        experts: its mixtures of experts, or None.
        defaults: values of keys that its config.json may leave out.
    """

    architecture: str
    model_type: str
    window_rule: WindowRule = "never"
    attention_bias: BiasRule = "by_config"
    has_mlp_bias_option: bool = False
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    has_post_norms: bool = False
    norm_weight_offset: float = 0.0
    scales_embeddings: bool = False
    attention_scale_key: str | None = None
    activation_key: str = "hidden_act"
    has_attention_softcap: bool = False
    has_final_softcap: bool = False
    has_local_rope: bool = False
    has_nope_layers: bool = False
    has_fused_projections: bool = False
    has_sinks: bool = False
    experts: ExpertFamily | None = None
    defaults: Mapping[str, object]


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
            Family(
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
                architecture="Qwen3MoeForCausalLM",
                model_type="qwen3_moe",
                window_rule="when_used",
                has_qk_norm=True,
                experts=ExpertFamily(size_key="moe_intermediate_size", has_dense_layers=True),
                defaults={"sliding_window": 4096, "max_position_embeddings": 32768},
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
            Family(
                architecture="GptOssForCausalLM",
                model_type="gpt_oss",
                window_rule="all_but_every_nth",
                has_sinks=True,
                experts=ExpertFamily(number_key="num_local_experts", renormalises=True, has_bias=True),
                defaults=_GPT_OSS_DEFAULTS,
            ),
            Family(
                architecture="Phi3ForCausalLM",
                model_type="phi3",
                window_rule="always",
                attention_bias="never",
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
            Family(
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
            ),
            Family(
                architecture="Gemma3ForCausalLM",
                model_type="gemma3_text",
                window_rule="all_but_every_nth",
                has_qk_norm=True,
                has_post_norms=True,
                norm_weight_offset=1.0,
                scales_embeddings=True,
                attention_scale_key="query_pre_attn_scalar",
                activation_key="hidden_activation",
                has_final_softcap=True,
                has_local_rope=True,
                defaults=_GEMMA_DEFAULTS
                | {
                    "sliding_window_pattern": 6,
                    "max_position_embeddings": 131072,
                    "rope_theta": 1_000_000.0,
                    "rope_local_base_freq": 10_000.0,
                },
            ),
        )
    }
)


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json, by its architectures or, if it names none, its model_type.

    Raises:
        UnsupportedModelError: none of them is supported; the message lists what is.
    """
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return _pick("architecture", architectures[0], lambda family: family.architecture)
    return _pick("model_type", config.get("model_type"), lambda family: family.model_type)


def _pick(what: str, value: object, name_of: Callable[[Family], str]) -> Family:
    families = {name_of(family): family for family in FAMILIES.values()}
    if isinstance(value, str) and value in families:
        return families[value]
    if isinstance(value, str) and value in _MISSING:
        raise UnsupportedModelError(
            f"{what} {value!r} is not supported: {_MISSING[value]}; supported: {', '.join(families)}"
        )
    raise UnsupportedModelError(
        f"{what} {value!r} is not supported{suggest(str(value), families)}; supported: {', '.join(families)}"
    )
