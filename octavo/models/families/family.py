"""What an architecture is, as data: how its network differs from others, and what its config leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# How a family decides which layers have a sliding window when its config has no layer_types.
WindowRule = Literal[
    "never", "always", "when_used", "after_max_window_layers", "all_but_every_nth", "without_rope"
]
# Which of the q, k, v and output projections have a bias.
BiasRule = Literal["never", "qkv", "by_config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFamily:
    """The mixtures of experts of an architecture.

    Attributes:
        number_key: key of the number of experts of a layer.
        size_key: key of the width of an expert's feed-forward.
        renormalises: a token's router weights are divided by their sum; None: by norm_topk_prob.
        has_dense_layers: config.json may give layers a feed-forward instead (decoder_sparse_step,
            mlp_only_layers).
        is_gpt_oss: they are like gpt-oss's: router and experts have biases, the experts' activation is
            "clamped_swiglu", checkpoints have a layout of their own, and may be in MXFP4.
    """

    number_key: str = "num_experts"
    size_key: str = "intermediate_size"
    renormalises: bool | None = None
    has_dense_layers: bool = False
    is_gpt_oss: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What one architecture does differently from others.

    Attributes:
        architecture: its name in config.json.
        model_type: model_type of its config.json.
        window_rule: which layers have a sliding window.
        attention_bias: which attention projections have a bias.
        has_mlp_bias_option: config.json may switch feed-forward biases on (mlp_bias).
        has_qk_norm: queries and keys are normalised per head, before the rotation.
        has_wide_qk_norm: queries are normalised over all heads before the rotation, and keys likewise.
        has_pre_norms: attention and feed-forward read the residual stream through a norm.
        has_post_norms: attention and feed-forward outputs are normalised before the residual sum.
        norm_weight_offset: added to stored norm weights; 1 where weight - 1 is stored.
        scales_embeddings: embeddings are multiplied by sqrt(hidden size).
        attention_scale_key: key of the number whose 1 / sqrt scales q.k; None: the head dimension.
        has_multipliers: config.json has factors of embeddings, of q.k, of what blocks add to the residual
            stream, and a divisor of logits.
        output_bias_key: key that switches the bias of the attention's output on.
        activation_key: key that names the feed-forward activation; Gemma ignores its own hidden_act.
        has_attention_softcap: config.json may bound attention scores.
        has_final_softcap: config.json may bound logits.
        has_local_rope: sliding layers have rotary frequencies of their own.
        has_nope_layers: some layers do not rotate queries and keys (no_rope_layers).
        has_nope_full_layers: in a network with windows, layers without one do not rotate.
        has_partial_rotary: config.json may rotate only a part of each head (partial_rotary_factor).
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
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norm_weight_offset: float = 0.0
    scales_embeddings: bool = False
    attention_scale_key: str | None = None
    has_multipliers: bool = False
    output_bias_key: str = "attention_bias"
    activation_key: str = "hidden_act"
    has_attention_softcap: bool = False
    has_final_softcap: bool = False
    has_local_rope: bool = False
    has_nope_layers: bool = False
    has_nope_full_layers: bool = False
    has_partial_rotary: bool = False
    has_fused_projections: bool = False
    has_sinks: bool = False
    experts: ExpertFamily | None = None
    defaults: Mapping[str, object]
