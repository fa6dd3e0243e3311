"""Names and shapes of a network's tensors, known before any file is opened.

Checkpoints of some families have one matrix for the projections of one input:

    here     self_attn.q_proj.weight, .k_proj, .v_proj    mlp.gate_proj.weight, .up_proj
    Phi-3    self_attn.qkv_proj.weight [q | k | v]        mlp.gate_up_proj.weight [gate | up]
"""

import math
from collections.abc import Mapping
from itertools import accumulate, chain
from types import MappingProxyType

from octavo.errors import WeightsError
from octavo.models.model_config import ModelConfig
from octavo.models.renamed import Place, by_name, renamed
from octavo.models.weights import WeightSource

# A layer with experts beside a feed-forward has these norms after the latter, before and after the experts.
EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that is here, by its Hugging Face name, in loading order."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        **_layer_input_shapes(config),
    }
    for index in range(config.num_layers):
        layer = _attention_shapes(config, index) | _block_shapes(config, index) | _norm_shapes(config)
        if size := config.layer_input_size:
            layer |= _linear_shapes("per_layer_input_gate", size, config.hidden_size, False)
            layer |= _linear_shapes("per_layer_projection", config.hidden_size, size, False)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    pooling = config.pooling
    if pooling is not None and pooling.task == "classify" and not pooling.token_ids:
        shapes["score.weight"] = (pooling.size, config.hidden_size)
    if not config.tie_word_embeddings and (pooling is None or pooling.token_ids):
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def draft_names(weights: WeightSource, config: ModelConfig) -> set[str]:
    """Return the names of a checkpoint's tensors that predict a token further, which Octavo does not read."""
    first = config.num_layers
    layers = (f"model.layers.{first + index}." for index in range(config.num_draft_layers))
    parts = ("model.mtp_", "mtp.", *layers)
    return {name for name in weights.names() if name.startswith(parts)}


def unread_names(weights: WeightSource, config: ModelConfig) -> set[str]:
    """Return the names of a checkpoint's keys and values for layers that read those of another layer."""
    shared = [index for index in range(config.num_layers) if config.shares_cache(index)]
    parts = tuple(f"model.layers.{index}.self_attn.{kind}_" for index in shared for kind in "kv")
    return {name for name in weights.names() if name.startswith(parts)}


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


def projections(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Return what an attention layer projects to: queries, keys and values, as far as it has its own."""
    if config.shares_cache(layer):
        return ("q",)
    return ("q", "k") if config.keys_are_values(layer) else ("q", "k", "v")


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    cache, own = config.cache_layer(layer), projections(config, layer)
    q_size, kv_size = config.num_heads * cache.head_dim, cache.num_kv_heads * cache.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name in own:
        size = q_size if name == "q" else kv_size
        shapes |= _linear_shapes(f"self_attn.{name}_proj", size, config.hidden_size, config.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", config.hidden_size, q_size, config.has_output_bias)
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (cache.head_dim,) for name in own[:2]}
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    if config.has_wide_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (q_size,), "self_attn.k_norm.weight": (kv_size,)}
    return shapes


def _block_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's feed-forward, or of its router and experts."""
    experts = config.experts
    dense = _feed_forward_shapes("mlp", config, config.feed_forward_size(layer), config.has_mlp_bias)
    if experts is None or not experts.layers[layer]:
        return dense
    shapes = dense if experts.is_beside_dense else {}
    if experts.is_beside_dense:
        shapes |= {"mlp.gate.scale": (config.hidden_size,), "mlp.gate.per_expert_scale": (experts.number,)}
    shapes |= _linear_shapes("mlp.gate", experts.number, config.hidden_size, experts.has_bias)
    if experts.has_choice_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.number,)
    if experts.shared_size:
        shapes |= _feed_forward_shapes("mlp.shared_expert", config, experts.shared_size, config.has_mlp_bias)
    if experts.has_shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, config.hidden_size)
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
    names = ["post_attention_layernorm"]
    if config.has_pre_norms:
        names.insert(0, "input_layernorm")
    if config.has_pre_norms and config.has_post_norms:
        names.append("pre_feedforward_layernorm")
    if config.has_post_norms:
        names.append("post_feedforward_layernorm")
    if config.experts is not None and config.experts.is_beside_dense:
        names += EXPERT_NORMS
    if config.layer_input_size:
        names.append("post_per_layer_input_norm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (config.hidden_size,) for name in names}
    return shapes | {"layer_scalar": (1,)} if config.has_layer_scales else shapes


def _layer_input_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what gives each layer an embedding of a token."""
    size = config.layer_input_size
    if size == 0:
        return {}
    width = config.num_layers * size
    return {
        "model.embed_tokens_per_layer.weight": (config.layer_input_vocab_size, width),
        "model.per_layer_model_projection.weight": (width, config.hidden_size),
        "model.per_layer_projection_norm.weight": (size,),
    }


def _linear_shapes(name: str, out_size: int, in_size: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (out_size, in_size)}
    return weight | {f"{name}.bias": (out_size,)} if has_bias else weight


_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


def with_own_projections(weights: WeightSource, config: ModelConfig) -> WeightSource:
    """Return a source that hands out each projection by its own name.

    Raises:
        WeightsError: a stored matrix does not have the rows of its projections, or one is there twice.
    """
    if not config.has_fused_projections:
        return weights
    shapes = parameter_shapes(config)
    num_rows = {
        f"model.layers.{layer}.{fused}.weight": {
            name: shapes[name][0] for name in (f"model.layers.{layer}.{part}.weight" for part in parts)
        }
        for layer in range(config.num_layers)
        for fused, parts in _FUSED.items()
    }
    stored = (Place(name=name, shape=tuple(weights.shape(name))) for name in sorted(weights.names()))
    places = (
        _parts(place, num_rows[place.name]) if place.name in num_rows else [(place.name, place)]
        for place in stored
    )
    return renamed(weights, by_name(chain.from_iterable(places)))


def _parts(stored: Place, num_rows: Mapping[str, int]) -> list[tuple[str, Place]]:
    """Return the projections of a stored matrix, given the rows of each."""
    if stored.shape[0] != sum(num_rows.values()):
        raise WeightsError(
            f"{stored.name} is {list(stored.shape)}, expected {sum(num_rows.values())} rows for "
            f"{', '.join(num_rows)} together"
        )
    firsts = accumulate(num_rows.values(), initial=0)
    return [
        (name, Place(name=stored.name, shape=(size, *stored.shape[1:]), first=first))
        for (name, size), first in zip(num_rows.items(), firsts, strict=False)
    ]
