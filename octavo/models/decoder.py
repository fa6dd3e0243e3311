"""One decoder for all families: what differs between them is data, not code."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.errors import InvalidArgumentError
from octavo.layers import (
    AttentionLayer,
    AttentionStep,
    Embedding,
    FeedForward,
    LMHead,
    Pooler,
    Rotary,
    make_step,
)
from octavo.layers.compiled_stack import LayerStack
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.layers.steps.cpu_step import CpuStep
from octavo.models.model_config import ModelConfig
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each adding to the residual stream.

    Attributes:
        attention: the attention block.
        feed_forward: the feed-forward block, or experts in its place.
    """

    attention: AttentionLayer
    feed_forward: FeedForward | ExpertFeedForward

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What layers have in common if they launch the same kernels."""
        options = self.attention.options
        return (
            options.window,
            options.rope,
            options.softcap,
            options.sinks is not None,
            *(self.attention.qkv_proj.kind, self.attention.o_proj.kind),
            self.feed_forward.kind,
        )

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotations: Sequence[Tensor],
        step: AttentionStep,
        slots: Tensor | None = None,
    ) -> Tensor | None:
        """Run the layer.

        The sum into the residual stream is a separate kernel only in blocks that read it without a norm:
        elsewhere the GEMM of a block's output adds it, or the norm that reads the sum next.

        Args:
            hidden: [T, hidden] residual stream; mutated.
            delta: [T, hidden] that this layer first adds to hidden, or None.
            rotations: the step's, one per rope of the network.
            step: attention over the cache; writes this step's keys and values.
            slots: [T], negative for padding, which experts leave out; None: there is no padding.

        Returns:
            [T, hidden] that the next layer has to add to hidden, or None if it is added already. Each of
            several ranks has a part of it, unless the network norms outputs.
        """
        delta = self.attention(hidden, delta, rotations, step)
        if isinstance(self.feed_forward, ExpertFeedForward):
            return self.feed_forward(hidden, delta, slots)
        return self.feed_forward(hidden, delta)


@dataclass(frozen=True, slots=True)
class Decoder:
    """One rank's share of a decoder-only transformer.

    Attributes:
        config: the whole network.
        num_heads: query heads of this rank.
        num_kv_heads: kv heads of this rank: what its KV cache must hold.
        attention_impl: see octavo.attention.available_impls.
        deterministic: a token's results do not depend on what runs beside it; see load_decoder.
        embed_tokens: ids to hidden states.
        ropes: config.ropes on the device.
        layers: config.num_layers of them.
        lm_head: last hidden states to logits, the last norm included.
        pooler: last hidden states to what is pooled; None: the network generates text.
        kv_scales: [num_layers, 2, num_kv_heads] float32, by which a float8 cache divides keys and values; or
            None.
        stack: the layers as one call for CPUs; None: they are called one by one.
        parallel: this rank.
    """

    config: ModelConfig
    num_heads: int
    num_kv_heads: int
    attention_impl: str
    deterministic: bool
    embed_tokens: Embedding
    ropes: tuple[Rotary, ...]
    layers: tuple[DecoderLayer, ...]
    lm_head: LMHead
    pooler: Pooler | None = None
    kv_scales: Tensor | None = None
    stack: LayerStack | None = None
    parallel: TensorParallel = TensorParallel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.embed_tokens.dtype

    def describe(self) -> tuple[object, ...]:
        """Return what decides which kernels it launches: shapes and dtypes, not weights."""
        heads = (self.num_heads, self.num_kv_heads)
        is_scaled = self.kv_scales is not None
        own = (self.config, *heads, self.dtype, self.attention_impl, self.deterministic, is_scaled)
        kinds = tuple(dict.fromkeys(layer.kind for layer in self.layers))
        return (*own, kinds, self.parallel.describe())

    def forward(self, input_ids: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Run a step. Call it under torch.inference_mode.

        Args:
            input_ids: [T] int32 or int64.
            kv_cache: of config.num_layers layers and num_kv_heads kv heads; this step's tokens are written.
            metadata: the step's ragged batch. On a GPU a token without a slot may get no experts.

        Returns:
            [T, hidden] for compute_logits: the residual stream after the last layer.

        Raises:
            InvalidArgumentError: (on a CPU) the arguments do not fit each other or the network.
        """
        hidden = self.embed_tokens(input_ids)
        if not hidden.is_cuda:
            self._check_step(input_ids, kv_cache, metadata)
        step = make_step(
            kv_cache,
            metadata,
            num_heads=self.num_heads,
            impl=self.attention_impl,
            dtype=hidden.dtype,
            deterministic=self.deterministic,
        )
        rotations = [step.rotations(rope, metadata.positions) for rope in self.ropes]
        if self.stack is not None and isinstance(step, CpuStep):
            step.run_layers(self.stack, hidden, rotations)
            return hidden
        # Graphs on GPUs have padding; that of one token has none.
        slots = metadata.slot_mapping if hidden.is_cuda and len(hidden) > 1 else None
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, rotations, step, slots)
        if delta is None:
            return hidden
        # A norm of the output has summed it over ranks.
        return hidden.add_(delta if self.config.has_post_norms else self.parallel.all_reduce(delta))

    def _check_step(self, input_ids: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Check what C takes for granted."""
        num_tokens, num_positions = input_ids.shape[0], metadata.positions.shape[0]
        if num_tokens != num_positions:
            raise InvalidArgumentError(f"got {num_tokens} input_ids for {num_positions} positions")
        num_layers, _, _, num_kv_heads, _, head_dim = kv_cache.data.shape
        found, needed = (num_kv_heads, head_dim), (self.num_kv_heads, self.config.head_dim)
        if num_layers < len(self.layers) or found != needed:
            raise InvalidArgumentError(
                f"the KV cache is of {num_layers} layers with {found[0]} kv heads x {found[1]}, the network "
                f"of {len(self.layers)} with {needed[0]} x {needed[1]}"
            )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [R, vocab size] logits of [R, hidden] rows of forward's result; dtype: see LMHead."""
        return self.lm_head(hidden)
