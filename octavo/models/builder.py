"""Makes a decoder's modules: reads each weight, or this rank's part of it, and packs it for its GEMM.

One weight is finished before the next one is read.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.forms.base import QuantisedWeight
from octavo.gemm.cpu.block_linear import AnyBlocks, BlockLinear, TiledBlocks, tiled_on_cpu
from octavo.gemm.cpu.huge_pages import HugePages, return_freed_memory
from octavo.gemm.linear import Linear, PlainLinear
from octavo.gemm.make_linear import make_invariant_linear, make_linear, make_quantised_linear, stacks_experts
from octavo.layers import (
    AttentionLayer,
    BlockInput,
    BlockOutput,
    Embedding,
    FeedForward,
    HeadRMSNorm,
    LayerOptions,
    LMHead,
    Pooler,
    RMSNorm,
    WideQKNorm,
    interleave_halves,
    vocabulary_shard,
)
from octavo.layers.expert_feed_forward import DenseAndExperts, ExpertFeedForward, SharedExpert
from octavo.layers.experts import Experts, ListedExperts
from octavo.layers.layer_inputs import InputBlock, LayerInputs
from octavo.layers.router import Router, Scoring
from octavo.models.checkpoint import Checkpoint
from octavo.models.decoder import DecoderLayer
from octavo.models.experts.experts_config import ExpertsConfig, expert_part, names_expert_parallel
from octavo.models.experts.loading import ExpertShape, read_stacked
from octavo.models.model_config import ModelConfig
from octavo.models.parameters import EXPERT_NORMS, projections
from octavo.models.weights import Part
from octavo.parallel import TensorParallel, shard_heads, shard_range


@dataclass(frozen=True, slots=True)
class _Heads:
    """A rank's heads of one layer: their ranges and dimension, and the projections that the layer has."""

    query: range
    kv: range
    head_dim: int
    own: tuple[str, ...]

    def rows(self, heads: range) -> slice:
        """Return the rows of some heads in their projection."""
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)


class Builder:
    """Makes a rank's modules, in the order of parameter_shapes."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        parallel: TensorParallel,
        quantization: str,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._parallel = parallel
        self._quantization = quantization
        self._matrix_dtype = torch.bfloat16 if quantization == "bf16" else checkpoint.dtype
        self._deterministic = deterministic
        # They hold weights that a CPU multiplies in their blocks.
        self._pages = HugePages()
        # Reads matrices whole.
        self._single = self
        if parallel.size > 1:
            self._single = Builder(config, checkpoint, TensorParallel(), quantization, deterministic)

    def layer_inputs(self) -> LayerInputs | None:
        """What gives each layer an embedding of a token, whole on every rank; None: layers have none."""
        config, single = self._config, self._single
        size = config.layer_input_size
        if size == 0:
            return None
        name, width = "model.embed_tokens_per_layer.weight", slice(0, size * config.num_layers)
        weight, _ = single._vocabulary_rows(name, config.layer_input_vocab_size)
        embedding = Embedding(weight, 0, math.sqrt(size), TensorParallel(), self._checkpoint.dtype)
        projection = single._fused(["model.per_layer_model_projection"], [width], False)
        # Checkpoints divide what is projected by the root of the hidden size before the norm.
        eps = config.rms_norm_eps * config.hidden_size
        norm = RMSNorm(self._norm_weight("model.per_layer_projection_norm"), eps)
        return LayerInputs(embedding, projection, norm)

    def embedding(self) -> tuple[Embedding, Tensor | TiledBlocks]:
        """The embedding, and its weight for an LM head that is tied to it."""
        weight, first = self._vocabulary_rows("model.embed_tokens.weight", self._config.vocab_size)
        multiplier, dtype = self._config.embedding_multiplier, self._checkpoint.dtype
        return Embedding(weight, first, multiplier, self._parallel, dtype), weight

    def lm_head(self, embedding_weight: Tensor | TiledBlocks) -> LMHead:
        """The last norm and the head."""
        config = self._config
        norm = self._norm("model.norm", 1 / config.logits_scaling)
        weight = embedding_weight
        if not (config.tie_word_embeddings or config.pooling):
            weight, _ = self._vocabulary_rows("lm_head.weight", config.vocab_size)
        if isinstance(weight, TiledBlocks):
            linear = BlockLinear([weight])
        elif config.pooling is not None and self._checkpoint.device.type == "cpu":
            # Nobody samples from it, so the weight is not packed, which would copy it.
            linear = PlainLinear(weight, None)
        elif self._deterministic:
            # Always float32: a request for log-probabilities must not change what others sample from.
            linear = make_invariant_linear(weight, dtype=torch.float32)
        else:
            linear = self._linear(weight)
        return LMHead(BlockInput(norm, linear), config.vocab_size, config.final_softcap, self._parallel)

    def pooler(self) -> Pooler | None:
        """The last norm, and the logits of labels if there are any; None: the network generates text."""
        pooling, read = self._config.pooling, self._checkpoint.read
        if pooling is None:
            return None
        norm, weight = self._norm("model.norm"), None
        if pooling.token_ids:
            head = "model.embed_tokens" if self._config.tie_word_embeddings else "lm_head"
            parts = [slice(token_id, token_id + 1) for token_id in pooling.token_ids]
            rows = [read(f"{head}.weight", rows=part, dtype=torch.float32) for part in parts]
            # The sigmoid of a difference is the softmax of two.
            weight = rows[1] - rows[0]
        elif pooling.task == "classify":
            weight = read("score.weight", dtype=torch.float32)
        if weight is None:
            return Pooler(norm, None)
        return Pooler(
            norm, make_invariant_linear(weight) if self._deterministic else PlainLinear(weight, None)
        )

    def _norm(self, name: str, factor: float = 1.0, stream_scale: float = 1.0) -> RMSNorm:
        # With norms of outputs, what outputs return is summed over ranks already.
        parallel = TensorParallel() if self._config.has_post_norms else self._parallel
        # A factor is folded in where it is not rounded.
        weight = self._norm_weight(name) if factor == 1.0 else factor * self._norm_weight(name, torch.float32)
        return RMSNorm(weight, self._config.rms_norm_eps, parallel, stream_scale)

    def layers(self) -> Iterator[DecoderLayer]:
        """Load the layers, each of which begins with the scale of the one before."""
        scale = 1.0
        for index in range(self._config.num_layers):
            layer = self._layer(index, scale)
            scale = layer.scale
            yield layer

    def _layer(self, index: int, stream_scale: float) -> DecoderLayer:
        """Load one layer, then return the temporary memory of reading and packing it."""
        config, prefix = self._config, f"model.layers.{index}"
        scale = 1.0
        if config.has_layer_scales:
            scale = float(self._checkpoint.read(f"{prefix}.layer_scalar", dtype=torch.float32))
        attention = self._attention(prefix, index, stream_scale)
        # The last block's norm has the scale, too.
        block_scale = 1.0 if config.layer_input_size else scale
        if config.experts is None or not config.experts.layers[index]:
            feed_forward = self._feed_forward(prefix, index, scale=block_scale)
        elif config.experts.is_beside_dense:
            feed_forward = self._dense_and_experts(prefix, index, block_scale)
        else:
            feed_forward = self._experts(prefix)
        block = self._input_block(prefix, scale) if config.layer_input_size else None
        layer = DecoderLayer(attention, feed_forward, block, scale)
        if self._checkpoint.device.type == "cpu":
            return_freed_memory()
        return layer

    def _attention(self, prefix: str, index: int, stream_scale: float) -> AttentionLayer:
        config, block = self._config, f"{prefix}.self_attn"
        heads = self._heads(index)
        norm = None
        if config.has_pre_norms:
            norm = self._norm(f"{prefix}.input_layernorm", stream_scale=stream_scale)
        post_norm = self._norm(f"{prefix}.post_attention_layernorm") if config.has_post_norms else None
        qkv = self._qkv(block, heads)
        output = self._row_parallel(f"{block}.o_proj", heads.rows(heads.query), config.has_output_bias)
        return AttentionLayer(
            qkv_proj=BlockInput(norm, qkv),
            o_proj=BlockOutput(output, post_norm, self._parallel),
            wide_norm=self._wide_qk_norm(block, heads) if config.has_wide_qk_norm else None,
            options=LayerOptions(
                layer=config.layer_caches[index],
                rope=config.layer_ropes[index],
                scale=config.attention_scale,
                window=config.layer_windows[index],
                softcap=config.attention_softcap,
                qk_norm=self._qk_norm(block, heads) if config.has_qk_norm else None,
                sinks=self._sinks(block, heads.query) if config.has_sinks else None,
                has_gemvs=qkv.has_gemv and output.has_gemv,
                value_norm=config.rms_norm_eps if config.has_value_norm else None,
                keys_are_values=config.keys_are_values(index),
                shares_cache=config.shares_cache(index),
            ),
        )

    def _feed_forward(
        self, prefix: str, index: int, output_norm: str = "post_feedforward_layernorm", scale: float = 1.0
    ) -> FeedForward:
        """The feed-forward block; scale: of what its norm returns, if it has one."""
        config = self._config
        # Without post-norms, checkpoints call this norm as others call the attention's post-norm.
        norm_name = "pre_feedforward_layernorm" if config.has_post_norms else "post_attention_layernorm"
        norm = self._norm(f"{prefix}.{norm_name}") if config.has_pre_norms else None
        post_norm = self._norm(f"{prefix}.{output_norm}", scale) if config.has_post_norms else None
        inner = shard_range(config.feed_forward_size(index), self._parallel, what="feed-forward columns")
        rows = slice(inner.start, inner.stop)
        names = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        gate_up = self._fused(names, [rows, rows], config.has_mlp_bias)
        down = self._row_parallel(f"{prefix}.mlp.down_proj", rows, config.has_mlp_bias)
        return FeedForward(
            BlockInput(norm, gate_up, config.activation), BlockOutput(down, post_norm, self._parallel)
        )

    def _dense_and_experts(self, prefix: str, index: int, scale: float) -> DenseAndExperts:
        config, experts = self._config, self._config.experts
        assert experts is not None, "a network without experts"
        dense_norm, norm, routed_norm = EXPERT_NORMS
        router = self._router(f"{prefix}.mlp.gate", experts)
        # Checkpoints divide by the root of the hidden size what they multiply with the weight.
        weight = self._checkpoint.read(f"{prefix}.mlp.gate.scale", dtype=torch.float32)
        return DenseAndExperts(
            dense=self._feed_forward(prefix, index, dense_norm),
            router_norm=RMSNorm(weight / math.sqrt(config.hidden_size), config.rms_norm_eps),
            norm=self._norm(f"{prefix}.{norm}"),
            router=router,
            experts=self._routed(f"{prefix}.mlp", router, experts),
            routed_norm=self._norm(f"{prefix}.{routed_norm}"),
            output_norm=self._norm(f"{prefix}.post_feedforward_layernorm", scale),
            parallel=self._parallel,
        )

    def _input_block(self, prefix: str, scale: float) -> InputBlock:
        config, single = self._config, self._single
        rows = slice(0, config.layer_input_size)
        gate = single._fused([f"{prefix}.per_layer_input_gate"], [rows], False)
        output = single._row_parallel(f"{prefix}.per_layer_projection", rows, False)
        norm = self._norm(f"{prefix}.post_per_layer_input_norm", scale)
        return InputBlock(
            BlockInput(None, gate), config.activation, BlockOutput(output, norm, TensorParallel())
        )

    def _experts(self, prefix: str) -> ExpertFeedForward:
        experts = self._config.experts
        assert experts is not None, "a network without experts"
        norm = self._norm(f"{prefix}.post_attention_layernorm")
        router = self._router(f"{prefix}.mlp.gate", experts)
        shared = self._shared_expert(f"{prefix}.mlp", experts) if experts.shared_size else None
        routed = self._routed(f"{prefix}.mlp", router, experts)
        return ExpertFeedForward(norm, router, routed, self._parallel, shared)

    def _router(self, name: str, experts: ExpertsConfig) -> Router:
        dtype = torch.float32 if experts.has_float32_router else None
        return Router(
            self._checkpoint.read(f"{name}.weight", dtype=dtype),
            experts.num_chosen,
            experts.renormalises,
            self._deterministic,
            self._checkpoint.read(f"{name}.bias") if experts.has_bias else None,
            experts.held,
            self._scoring(name, experts),
        )

    def _routed(self, prefix: str, router: Router, experts: ExpertsConfig) -> Experts:
        names = [f"{prefix}.experts.{number}" for number in experts.here]
        builder = self if experts.held is None else self._single
        with names_expert_parallel(experts, self._parallel):
            read = builder._stacked if stacks_experts(router.weight) else builder._listed
            return read(names, experts)

    def _scoring(self, prefix: str, experts: ExpertsConfig) -> Scoring | None:
        bias = factors = None
        if experts.has_choice_bias:
            bias = self._checkpoint.read(f"{prefix}.e_score_correction_bias", dtype=torch.float32)
        if experts.is_beside_dense:
            factors = self._checkpoint.read(f"{prefix}.per_expert_scale", dtype=torch.float32)
        scoring = Scoring(experts.is_sigmoid, bias, experts.groups, experts.scaling, factors)
        return None if scoring == Scoring() else scoring

    def _shared_expert(self, prefix: str, experts: ExpertsConfig) -> SharedExpert:
        inner = shard_range(experts.shared_size, self._parallel, what="columns of shared experts")
        rows, has_bias = slice(inner.start, inner.stop), self._config.has_mlp_bias
        names = [f"{prefix}.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        gate = None
        if experts.has_shared_gate:
            weight = self._checkpoint.read(f"{prefix}.shared_expert_gate.weight")
            gate = make_invariant_linear(weight) if self._deterministic else PlainLinear(weight, None)
        return SharedExpert(
            self._fused(names[:2], [rows, rows], has_bias),
            self._row_parallel(names[2], rows, has_bias),
            self._config.activation,
            gate,
        )

    def _stacked(self, names: Sequence[str], experts: ExpertsConfig) -> Experts:
        inner = expert_part(experts, self._parallel)
        return read_stacked(
            self._checkpoint,
            names,
            self._part(slice(inner.start, inner.stop)),
            ExpertShape(len(inner), self._config.hidden_size, experts.has_bias, self._parallel.rank == 0),
            activation=self._config.activation,
            deterministic=self._deterministic,
            num_elsewhere=experts.number - len(names),
        )

    def _listed(self, names: Sequence[str], experts: ExpertsConfig) -> Experts:
        inner = expert_part(experts, self._parallel)
        rows, has_bias = slice(inner.start, inner.stop), experts.has_bias
        inputs = [[f"{name}.gate_proj", f"{name}.up_proj"] for name in names]
        return ListedExperts(
            [self._fused(pair, [rows, rows], has_bias) for pair in inputs],
            [self._row_parallel(f"{name}.down_proj", rows, has_bias) for name in names],
            self._config.activation,
        )

    def _heads(self, index: int) -> _Heads:
        config = self._config
        cache, own = config.cache_layer(index), projections(config, index)
        heads = shard_heads(config.num_heads, cache.num_kv_heads, self._parallel)
        return _Heads(heads.query, heads.kv, cache.head_dim, own)

    def _qkv(self, prefix: str, heads: _Heads) -> Linear:
        rows = [heads.rows(heads.query if name == "q" else heads.kv) for name in heads.own]
        names = [f"{prefix}.{name}_proj" for name in heads.own]
        return self._fused(names, rows, self._config.has_qkv_bias, heads.head_dim)

    def _sinks(self, prefix: str, heads: range) -> Tensor:
        return self._checkpoint.read(f"{prefix}.sinks", rows=self._part(slice(heads.start, heads.stop)))

    def _qk_norm(self, prefix: str, heads: _Heads) -> HeadRMSNorm:
        weights = []
        for name, own in zip(heads.own[:2], (heads.query, heads.kv), strict=False):
            weight = self._norm_weight(f"{prefix}.{name}_norm", torch.float32)
            weights.append(self._interleaved(weight, heads.head_dim).expand(len(own), -1))
        return HeadRMSNorm(torch.cat(weights), self._config.rms_norm_eps)

    def _wide_qk_norm(self, prefix: str, heads: _Heads) -> WideQKNorm:
        q, k = (
            self._interleaved(self._norm_weight(f"{prefix}.{name}"), heads.head_dim)[heads.rows(part)]
            for name, part in (("q_norm", heads.query), ("k_norm", heads.kv))
        )
        config = self._config
        sizes = (config.num_heads * heads.head_dim, config.num_kv_heads * heads.head_dim)
        return WideQKNorm((q, k), sizes, config.rms_norm_eps, self._parallel)

    def _fused(
        self, names: Sequence[str], rows: Sequence[slice], has_bias: bool, head_dim: int = 0
    ) -> Linear:
        """One product for several projections of the same input.

        With a head_dim, the first two are of queries and keys and reordered for the rotation (see
        layers.rotary).
        """
        size = sum(part.stop - part.start for part in rows)
        weights = [f"{name}.weight" for name in names]
        bias = None
        if has_bias:
            bias = self._checkpoint.empty(size)
            self._fill(bias, [f"{name}.bias" for name in names], rows, head_dim)
        if self._checkpoint.stays_quantised(weights[0]):
            return self._quantised_linear(self._read_quantised(weights, rows, head_dim), bias)
        weight = self._checkpoint.empty(size, self._config.hidden_size, dtype=self._matrix_dtype)
        self._fill(weight, weights, rows, head_dim)
        return self._linear(weight, bias)

    def _read_quantised(
        self, names: Sequence[str], rows: Sequence[slice], head_dim: int
    ) -> Iterator[QuantisedWeight]:
        for index, (name, part) in enumerate(zip(names, rows, strict=True)):
            weight = self._checkpoint.read_quantised(name, rows=self._part(part))
            if head_dim and index < 2:
                order = torch.arange(weight.shape[0], device=weight.device)
                weight = weight.take(self._interleaved(order, head_dim))
            yield weight

    def _fill(self, fused: Tensor, names: Sequence[str], rows: Sequence[slice], head_dim: int) -> None:
        start = 0
        for index, (name, part) in enumerate(zip(names, rows, strict=True)):
            tensor = self._checkpoint.read(name, rows=self._part(part), dtype=fused.dtype)
            if head_dim and index < 2:
                tensor = self._interleaved(tensor, head_dim)
            fused[start : start + tensor.shape[0]] = tensor
            start += tensor.shape[0]

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> Linear:
        """A projection whose results are summed over ranks: only rank 0 adds the bias."""
        bias = self._checkpoint.read(f"{name}.bias") if has_bias else None
        bias = bias if self._parallel.rank == 0 else None
        name, part = f"{name}.weight", self._part(columns)
        if self._checkpoint.stays_quantised(name):
            return self._quantised_linear([self._checkpoint.read_quantised(name, columns=part)], bias)
        return self._linear(self._checkpoint.read(name, columns=part, dtype=self._matrix_dtype), bias)

    def _quantised_linear(self, weights: Iterable[QuantisedWeight], bias: Tensor | None) -> Linear:
        # Each is finished before the next one is read: what was read of it can go.
        dtype = self._checkpoint.dtype
        finished = [tiled_on_cpu(weight, self._pages, dtype) for weight in weights]
        return make_quantised_linear(finished, bias, dtype=dtype, matrix_dtype=self._matrix_dtype)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self._deterministic:
            return make_invariant_linear(weight, bias)
        return make_linear(weight, bias, quantization=self._quantization)

    def _norm_weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A norm's weight; float32 if it is stored with an offset, which is for precision near 0."""
        offset = self._config.norm_weight_offset
        weight = self._checkpoint.read(f"{name}.weight", dtype=torch.float32 if offset else dtype)
        return weight + offset if offset else weight

    def _vocabulary_rows(self, name: str, num_rows: int) -> tuple[Tensor | TiledBlocks, int]:
        """This rank's rows, padded to the share that every rank has, and the id of the first row."""
        rows, share = vocabulary_shard(num_rows, self._parallel)
        if self._checkpoint.stays_quantised(name):
            blocks = self._checkpoint.read_quantised(name, rows=self._part(rows))
            assert isinstance(blocks, AnyBlocks), f"{name}: rows of {blocks.kind} cannot be looked up"
            return TiledBlocks(blocks, self._pages, num_rows=share), rows.start
        weight = self._checkpoint.read(name, rows=self._part(rows), dtype=self._matrix_dtype)
        if weight.shape[0] < share:
            weight = pad(weight, (0, 0, 0, share - weight.shape[0]))
        return weight, rows.start

    def _interleaved(self, tensor: Tensor, head_dim: int) -> Tensor:
        if self._config.rotates_pairs:
            return tensor
        return interleave_halves(tensor, head_dim, self._config.rotary_dim)

    def _part(self, part: slice) -> Part:
        """The slice to read; a single rank reads whole tensors."""
        return None if self._parallel.size == 1 else part
