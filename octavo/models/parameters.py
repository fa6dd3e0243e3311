"""Names and shapes of a network's tensors, known before any file is opened."""

import math

from octavo.models.model_config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that is here, by its Hugging Face name, in loading order."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for index in range(config.num_layers):
        layer = _attention_shapes(config) | _block_shapes(config, index) | _norm_shapes(config)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights; a tied LM head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of weights that a token is multiplied with, the embedding's table counted whole."""
    experts = config.experts
    if experts is None:
        return num_parameters(config)
    unused = (experts.number - experts.num_chosen) * sum(experts.layers)
    expert = _feed_forward_shapes("", config, experts.size, experts.has_bias)
    size = sum(map(math.prod, expert.values()))
    return num_parameters(config) - unused * size


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int) -> int:
    """Return the KV cache bytes one token takes over all layers, at `dtype_bytes` per number."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype_bytes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        shapes |= _linear_shapes(f"self_attn.{name}", size, config.hidden_size, config.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", config.hidden_size, q_size, config.has_output_bias)
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    if config.has_wide_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (kv_size,)}
    return shapes


def _block_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """A layer's feed-forward, or its router and experts."""
    experts = config.experts
    if experts is None or not experts.layers[layer]:
        return _feed_forward_shapes("mlp", config, config.intermediate_size, config.has_mlp_bias)
    shapes = _linear_shapes("mlp.gate", experts.number, config.hidden_size, experts.has_bias)
    for index in experts.here:
        shapes |= _feed_forward_shapes(f"mlp.experts.{index}", config, experts.size, experts.has_bias)
    return shapes


def _feed_forward_shapes(
    name: str, config: ModelConfig, inner: int, has_bias: bool
) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    return {
        **_linear_shapes(f"{name}.gate_proj", inner, hidden, has_bias),
        **_linear_shapes(f"{name}.up_proj", inner, hidden, has_bias),
        **_linear_shapes(f"{name}.down_proj", hidden, inner, has_bias),
    }


def _norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.has_post_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config.hidden_size,) for name in names}


def _linear_shapes(name: str, out_size: int, in_size: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (out_size, in_size)}
    return weight | {f"{name}.bias": (out_size,)} if has_bias else weight
