"""What an architecture is, as data: how its network differs from others, and what its config leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# How a family decides which layers have a sliding window when its config has no layer_types.
WindowRule = Literal[
    "never",
    "always",
    "when_used",
    "after_max_window_layers",
    "all_but_every_nth",
    "all_but_every_nth_and_last",
    "without_rope",
]
# Which of the q, k, v and output projections have a bias.
BiasRule = Literal["never", "qkv", "by_config", "qkv_by_config"]
# Keys by which families say which layers have a feed-forward in place of experts.
DenseRule = Literal[
    "none",
    "all_or_none",
    "sparse_step",
    "first_k_dense_replace",
    "moe_layer_interval",
    "mlp_layer_types",
    "enable_moe_block",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFamily:
    """The mixtures of experts of an architecture.

    Attributes:
        number_key: key of the number of experts of a layer.
        chosen_key: key of the number of experts that a token goes to.
        size_key: key of the width of an expert's feed-forward.
        renormalises: a token's router weights are divided by their sum; None: by norm_topk_prob.
        dense_rule: how config.json gives layers a feed-forward instead; "sparse_step": by
            decoder_sparse_step and mlp_only_layers; "all_or_none": all do if there are no experts.
        is_sigmoid: an expert's score is the sigmoid of its logit, not a softmax over all of them.
        has_choice_bias: a bias is added to scores for the choice alone.
        has_groups: config.json may have a token choose groups of experts first (n_group, topk_group).
        scaling_key: key of the factor of a token's router weights, or None.
        shared_key: key of the experts that every token goes to: how many, each as wide as the others; or, if
            it ends in "size", their width. None: there are none.
        has_float32_router: the router's weight stays in float32, and so does what it multiplies.
        has_shared_gate: what the shared experts return is multiplied by the sigmoid of a product with x.
        is_beside_dense: experts stand beside a feed-forward, each with norms of its own; the router has one,
            too, and a factor for each expert's weights.
        is_gpt_oss: they are like gpt-oss's: router and experts have biases, the experts' activation is
            "clamped_swiglu", checkpoints have a layout of their own, and may be in MXFP4.
    """

    number_key: str = "num_experts"
    chosen_key: str = "num_experts_per_tok"
    size_key: str = "intermediate_size"
    renormalises: bool | None = None
    dense_rule: DenseRule = "none"
    is_sigmoid: bool = False
    has_choice_bias: bool = False
    has_groups: bool = False
    scaling_key: str | None = None
    shared_key: str | None = None
    has_float32_router: bool = False
    has_shared_gate: bool = False
    is_beside_dense: bool = False
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
        has_qk_norm: queries and keys are normalised per head, before the rotation; a name: if that key says.
        has_wide_qk_norm: queries are normalised over all heads before the rotation, and keys likewise.
        has_pre_norms: attention and feed-forward read the residual stream through a norm.
        has_post_norms: attention and feed-forward outputs are normalised before the residual sum.
        norm_weight_offset: added to stored norm weights; 1 where weight - 1 is stored.
        scales_embeddings: embeddings are multiplied by sqrt(hidden size).
        attention_scale_key: key of the number whose 1 / sqrt scales q.k; None: the head dimension.
        attention_scale: factor of q.k; None: by that key.
        has_multipliers: config.json has factors of embeddings, of q.k, of what blocks add to the residual
            stream, and a divisor of logits.
        bias_key: key that switches the bias of q, k and v on.
        output_bias_key: key that switches the bias of the attention's output on.
        activation_key: key that names the feed-forward activation; Gemma ignores its own hidden_act.
        has_attention_softcap: config.json may bound attention scores.
        has_final_softcap: config.json may bound logits.
        has_local_rope: sliding layers have rotary frequencies of their own.
        rope_key: key that says "rope" where layers rotate queries and keys; None: there is none.
        dense_size_key: key of the width of a feed-forward without experts.
        has_query_growth: queries may grow with their position (llama_4_scaling_beta).
        has_nope_layers: some layers do not rotate queries and keys (no_rope_layers).
        has_nope_full_layers: in a network with windows, layers without one do not rotate.
        has_partial_rotary: config.json may rotate only a part of each head (partial_rotary_factor).
        has_full_heads: layers without a window may have heads of their own size and number (global_head_dim,
            num_global_key_value_heads), and keys for values (attention_k_eq_v).
        has_value_norm: values are normalised per head, without a weight.
        has_shared_caches: the last layers may read keys and values of an earlier one (num_kv_shared_layers),
            and have feed-forwards of twice the width (use_double_wide_mlp).
        has_layer_inputs: layers may have an embedding of every token each (hidden_size_per_layer_input).
        has_layer_scales: what leaves a layer is multiplied by a number of its own.
        rotates_pairs: checkpoints have the two numbers that turn together side by side.
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
    has_qk_norm: bool | str = False
    has_wide_qk_norm: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norm_weight_offset: float = 0.0
    scales_embeddings: bool = False
    attention_scale_key: str | None = None
    attention_scale: float | None = None
    has_multipliers: bool = False
    bias_key: str = "attention_bias"
    output_bias_key: str = "attention_bias"
    activation_key: str = "hidden_act"
    has_attention_softcap: bool = False
    has_final_softcap: bool = False
    has_local_rope: bool = False
    rope_key: str | None = None
    dense_size_key: str = "intermediate_size"
    has_query_growth: bool = False
    has_nope_layers: bool = False
    has_nope_full_layers: bool = False
    has_partial_rotary: bool = False
    has_full_heads: bool = False
    has_value_norm: bool = False
    has_shared_caches: bool = False
    has_layer_inputs: bool = False
    has_layer_scales: bool = False
    rotates_pairs: bool = False
    has_fused_projections: bool = False
    has_sinks: bool = False
    experts: ExpertFamily | None = None
    defaults: Mapping[str, object]
