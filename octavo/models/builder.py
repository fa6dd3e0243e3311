"""Makes a decoder's modules: reads each weight, or this rank's part of it, and packs it for its GEMM.

One weight is finished before the next one is read.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo.gemm.cpu.block_linear import BlockLinear, TiledBlocks
from octavo.gemm.cpu.huge_pages import return_freed_memory
from octavo.gemm.linear import PlainLinear
from octavo.gemm.make_linear import make_invariant_linear, stacks_experts
from octavo.layers import (
    BlockInput,
    BlockOutput,
    Embedding,
    FeedForward,
    LMHead,
    Pooler,
    RMSNorm,
)
from octavo.layers.expert_feed_forward import DenseAndExperts, ExpertFeedForward, SharedExpert
from octavo.layers.experts import Experts, ListedExperts
from octavo.layers.layer_inputs import InputBlock, LayerInputs
from octavo.layers.router import Router, Scoring
from octavo.models.building.attention import Attention
from octavo.models.decoder import DecoderLayer
from octavo.models.experts.experts_config import ExpertsConfig, expert_part, names_expert_parallel
from octavo.models.experts.loading import ExpertShape, read_stacked
from octavo.models.parameters import EXPERT_NORMS
from octavo.parallel import TensorParallel, shard_range


class Builder(Attention):
    """Makes a rank's modules, in the order of parameter_shapes."""

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
