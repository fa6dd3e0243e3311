"""The frozen description of a network, the same for all families, read from a config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.kv.cache_layers import CacheLayer
from octavo.layers import RopeConfig
from octavo.models.config_fields import ConfigFields
from octavo.models.experts.experts_config import ExpertsConfig, read_experts
from octavo.models.families.cache_fields import read_cache_layers, read_layer_caches
from octavo.models.families.layer_fields import (
    read_layer_ropes,
    read_layer_types,
    read_ropes,
    read_rotary_dims,
    read_windows,
)
from octavo.models.families.model_fields import (
    attention_scale,
    check_scheme,
    embedding_multiplier,
    has_qk_norm,
    layer_input,
    max_positions,
    multiplier,
    read_activation,
    read_draft_layers,
    read_dtype,
    read_eos_token_ids,
    read_token_id,
    require_supported,
    softcap,
)
from octavo.models.families.registry import find_family
from octavo.models.families.text_parts import text_fields
from octavo.models.formats.schemes import read_scheme
from octavo.parallel import TensorParallel, shard_heads, shard_whole
from octavo.pooling import Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: name in config.json, such as "LlamaForCausalLM".
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward block, in layers without experts.
        num_layers: decoder layers.
        num_draft_layers: layers after these in checkpoints, which predict a token further; they are not run.
        num_heads: query heads.
        cache_layers: what the layers with keys and values of their own keep; each number of kv heads divides
            num_heads.
        layer_caches: per layer, index into cache_layers of what it reads.
        has_keys_as_values: layers without a window have no projection of values.
        rotary_dim: how many dimensions of a head, the first ones, are rotated by the position; None: all.
        rotates_pairs: see Family.
        max_position_embeddings: longest context in tokens, with YaRN's stretching.
        rms_norm_eps: added to mean squares.
        norm_weight_offset: added to stored norm weights; Gemma stores weight - 1.
        activation: that of the feed-forward gate: "silu", "gelu", "gelu_tanh" or "clamped_swiglu".
        has_qkv_bias: q, k and v projections have biases.
        has_output_bias: the attention output projection has a bias.
        has_mlp_bias: the feed-forward projections have biases.
        has_qk_norm, has_wide_qk_norm, has_value_norm, has_pre_norms, has_post_norms: see Family.
        has_fused_projections, has_sinks, has_layer_scales: see Family.
        has_double_feed_forwards: layers that read another layer's keys have twice the intermediate size.
        layer_input_size: width of the embedding that each layer has of a token; 0: there is none.
        layer_input_vocab_size: rows of the table of these.
        embedding_multiplier: factor of embeddings.
        logits_scaling: divisor of logits.
        attention_scale: factor of q.k.
        attention_softcap: bound of attention scores; 0: none.
        final_softcap: bound of logits; 0: none.
        layer_windows: per layer, how many last keys a token sees, itself included; None: all.
        ropes: the rotary frequencies in use.
        rope_head_dims: of each of ropes, dimension of the heads that it turns.
        layer_ropes: per layer, index into ropes.
        experts: the mixtures of experts, or None.
        tie_word_embeddings: the LM head is the embedding.
        bos_token_id: begin-of-text id, or None.
        eos_token_ids: ids that end a text.
        dtype: type the checkpoint was saved in, or None.
        pooling: how it embeds or classifies; None: it generates text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_draft_layers: int
    num_heads: int
    cache_layers: tuple[CacheLayer, ...]
    layer_caches: tuple[int, ...]
    has_keys_as_values: bool
    rotary_dim: int | None
    rotates_pairs: bool
    max_position_embeddings: int
    rms_norm_eps: float
    norm_weight_offset: float
    activation: str
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_wide_qk_norm: bool
    has_value_norm: bool
    has_pre_norms: bool
    has_post_norms: bool
    has_fused_projections: bool
    has_sinks: bool
    has_layer_scales: bool
    has_double_feed_forwards: bool
    layer_input_size: int
    layer_input_vocab_size: int
    embedding_multiplier: float
    logits_scaling: float
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    layer_windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    rope_head_dims: tuple[int, ...]
    layer_ropes: tuple[int, ...]
    experts: ExpertsConfig | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    dtype: str | None
    pooling: Pooling | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> "ModelConfig":
        """Read a config.json as Hugging Face transformers 4 and 5 write it.

        Args:
            config: the parsed file.

        Raises:
            UnsupportedModelError: the architecture, or a key that changes the network, is not supported.
            FileFormatError: a field is missing or malformed.
        """
        family = find_family(config)
        fields = ConfigFields(text_fields(config, family.model_type), family.defaults, where="config.json")
        require_supported(fields, family)
        check_scheme(read_scheme(config), family)
        num_heads = fields.integer("num_attention_heads", maximum=2**14)
        hidden_size = fields.integer("hidden_size", maximum=2**20)
        num_layers = fields.integer("num_hidden_layers", maximum=2**14)
        layer_types = read_layer_types(fields, family, num_layers)
        windows = read_windows(fields, layer_types)
        layers = read_cache_layers(fields, family, layer_types, windows)
        layer_caches = read_layer_caches(fields, family, layers)
        head_dims = [layer.head_dim for layer in layers]
        rotary_dims = read_rotary_dims(fields, family, layer_types, head_dims)
        ropes = read_ropes(fields, family, rotary_dims)
        ropes = read_layer_ropes(fields, family, layer_types, ropes, rotary_dims)
        # Equal frequencies of heads of another size are others.
        layer_ropes = list(zip(ropes, head_dims, strict=True))
        used_ropes = tuple(dict.fromkeys(layer_ropes))
        bias_rule = family.attention_bias
        has_bias = "by_config" in bias_rule and fields.boolean(family.bias_key)
        residual = multiplier(fields, family, "residual_multiplier")
        model = cls(
            architecture=family.architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer(family.dense_size_key, maximum=2**24),
            num_layers=num_layers,
            num_draft_layers=read_draft_layers(fields),
            num_heads=num_heads,
            cache_layers=layers[: len(set(layer_caches))],
            layer_caches=layer_caches,
            has_keys_as_values=family.has_full_heads and fields.boolean("attention_k_eq_v"),
            rotary_dim=rotary_dims[layer_types[0]] if family.has_partial_rotary else None,
            rotates_pairs=family.rotates_pairs,
            max_position_embeddings=max_positions(fields, [rope for rope, _ in used_ropes]),
            # Blocks that add r * y to a stream are blocks that add y to a stream in units of r: a norm of it
            # is the same with eps / r**2.
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6) / residual**2,
            norm_weight_offset=family.norm_weight_offset,
            activation=read_activation(fields, family),
            has_qkv_bias=has_bias or bias_rule == "qkv",
            has_output_bias=bias_rule == "by_config" and fields.boolean(family.output_bias_key),
            has_mlp_bias=family.has_mlp_bias_option and fields.boolean("mlp_bias"),
            has_qk_norm=has_qk_norm(fields, family),
            has_wide_qk_norm=family.has_wide_qk_norm,
            has_value_norm=family.has_value_norm,
            has_pre_norms=family.has_pre_norms,
            has_post_norms=family.has_post_norms,
            has_fused_projections=family.has_fused_projections,
            has_sinks=family.has_sinks,
            has_layer_scales=family.has_layer_scales,
            has_double_feed_forwards=family.has_shared_caches and fields.boolean("use_double_wide_mlp"),
            layer_input_size=layer_input(fields, family, "hidden_size_per_layer_input"),
            layer_input_vocab_size=layer_input(fields, family, "vocab_size_per_layer_input"),
            embedding_multiplier=embedding_multiplier(fields, family, hidden_size) / residual,
            logits_scaling=multiplier(fields, family, "logits_scaling"),
            attention_scale=attention_scale(fields, family, layers[0].head_dim),
            attention_softcap=softcap(fields, "attn_logit_softcapping", allowed=family.has_attention_softcap),
            final_softcap=softcap(fields, "final_logit_softcapping", allowed=family.has_final_softcap),
            layer_windows=windows,
            ropes=tuple(rope for rope, _ in used_ropes),
            rope_head_dims=tuple(head_dim for _, head_dim in used_ropes),
            layer_ropes=tuple(used_ropes.index(rope) for rope in layer_ropes),
            experts=None if family.experts is None else read_experts(fields, family.experts, num_layers),
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            bos_token_id=read_token_id(fields, "bos_token_id"),
            eos_token_ids=read_eos_token_ids(fields),
            dtype=read_dtype(fields),
        )
        model._check_layer_inputs()
        return model

    @property
    def num_kv_heads(self) -> int:
        """The most key/value heads of any layer."""
        return max(layer.num_kv_heads for layer in self.cache_layers)

    @property
    def head_dim(self) -> int:
        """The largest dimension of a head."""
        return max(layer.head_dim for layer in self.cache_layers)

    def cache_layer(self, layer: int) -> CacheLayer:
        """Return what a decoder layer reads."""
        return self.cache_layers[self.layer_caches[layer]]

    def shares_cache(self, layer: int) -> bool:
        """Return whether a decoder layer reads keys and values that an earlier one stores."""
        return self.layer_caches[layer] in self.layer_caches[:layer]

    def keys_are_values(self, layer: int) -> bool:
        """Return whether a decoder layer stores keys and values of one projection."""
        is_full = self.layer_windows[layer] is None
        return self.has_keys_as_values and is_full and not self.shares_cache(layer)

    def feed_forward_size(self, layer: int) -> int:
        """Return the width of a decoder layer's feed-forward."""
        is_double = self.has_double_feed_forwards and self.shares_cache(layer)
        return self.intermediate_size * (2 if is_double else 1)

    def own_cache_layers(self, parallel: TensorParallel) -> tuple[CacheLayer, ...]:
        """Return what a rank keeps of cache_layers.

        Raises:
            ConfigError: the ranks do not divide the heads; see shard_heads.
        """
        return tuple(
            replace(layer, num_kv_heads=len(shard_heads(self.num_heads, layer.num_kv_heads, parallel).kv))
            for layer in self.cache_layers
        )

    def with_whole_experts(self, parallel: TensorParallel) -> "ModelConfig":
        """Return the network with the experts that a rank holds, if each rank holds whole ones.

        Raises:
            ConfigError: there are no experts, or more ranks than experts.
        """
        if self.experts is None:
            raise ConfigError(
                f"expert_parallel=True is for mixtures of experts, and {self.architecture} is none; "
                "tensor_parallel_size alone cuts it over ranks"
            )
        held = shard_whole(self.experts.number, parallel, what="experts")
        return replace(self, experts=replace(self.experts, held=held))

    def _check_layer_inputs(self) -> None:
        if self.layer_input_size and self.layer_input_vocab_size < self.vocab_size:
            raise UnsupportedModelError(
                f"config.json: vocab_size_per_layer_input = {self.layer_input_vocab_size} below vocab_size = "
                f"{self.vocab_size} is not supported"
            )
