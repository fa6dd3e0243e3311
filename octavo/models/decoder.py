"""One decoder for all families: what differs between them is data, not code."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.errors import InvalidArgumentError
from octavo.kv.cache_layers import CacheLayer
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
from octavo.layers.expert_feed_forward import DenseAndExperts, ExpertFeedForward
from octavo.layers.layer_inputs import InputBlock, LayerInputs
from octavo.layers.steps.cpu_step import cpu_steps, run_layers
from octavo.models.model_config import ModelConfig
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each adding to the residual stream.

    Attributes:
        attention: the attention block.
        feed_forward: the feed-forward block, or experts in its place or beside it.
        input_block: takes in the layer's own embedding of a token; None: it has none.
        scale: factor of what leaves the layer. The norm of its last block has it; the residual stream gets it
            where the next layer begins.
    """

    attention: AttentionLayer
    feed_forward: FeedForward | ExpertFeedForward | DenseAndExperts
    input_block: InputBlock | None = None
    scale: float = 1.0

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
            None if self.input_block is None else self.input_block.kind,
            (options.keys_are_values, options.shares_cache),
        )

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotations: Sequence[Tensor],
        step: AttentionStep,
        slots: Tensor | None = None,
        layer_input: Tensor | None = None,
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
            layer_input: [T, layer input size], the layer's own embeddings of the tokens, if it has any.

        Returns:
            [T, hidden] that the next layer has to add to hidden, or None if it is added already. Each of
            several ranks has a part of it, unless the network norms outputs.
        """
        delta = self.attention(hidden, delta, rotations, step)
        if isinstance(self.feed_forward, FeedForward):
            delta = self.feed_forward(hidden, delta)
        else:
            delta = self.feed_forward(hidden, delta, slots)
        if self.input_block is not None and layer_input is not None:
            delta = self.input_block(hidden, delta, layer_input)
        return delta


@dataclass(frozen=True, slots=True)
class Decoder:
    """One rank's share of a decoder-only transformer.

    Attributes:
        config: the whole network.
        num_heads: query heads of this rank.
        cache_layers: config.cache_layers with the kv heads of this rank: what its KV cache must hold.
        attention_impl: see octavo.attention.available_impls.
        deterministic: a token's results do not depend on what runs beside it; see load_decoder.
        embed_tokens: ids to hidden states.
        ropes: config.ropes on the device.
        layers: config.num_layers of them.
        lm_head: last hidden states to logits, the last norm included.
        pooler: last hidden states to what is pooled; None: the network generates text.
        kv_scales: [cache layers, 2, most kv heads] float32, by which a float8 cache divides keys and values;
            or None.
        layer_inputs: ids and hidden states to an embedding for each layer; None: layers have none.
        stack: the layers as one call for CPUs; None: they are called one by one.
        parallel: this rank.
    """

    config: ModelConfig
    num_heads: int
    cache_layers: tuple[CacheLayer, ...]
    attention_impl: str
    deterministic: bool
    embed_tokens: Embedding
    ropes: tuple[Rotary, ...]
    layers: tuple[DecoderLayer, ...]
    lm_head: LMHead
    pooler: Pooler | None = None
    kv_scales: Tensor | None = None
    layer_inputs: LayerInputs | None = None
    stack: LayerStack | None = None
    parallel: TensorParallel = TensorParallel()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.embed_tokens.dtype

    @property
    def num_kv_heads(self) -> int:
        """The most kv heads of any layer on this rank."""
        return max(layer.num_kv_heads for layer in self.cache_layers)

    def describe(self) -> tuple[object, ...]:
        """Return what decides which kernels it launches: shapes and dtypes, not weights."""
        heads = (self.num_heads, self.cache_layers)
        is_scaled = self.kv_scales is not None
        own = (self.config, *heads, self.dtype, self.attention_impl, self.deterministic, is_scaled)
        kinds = tuple(dict.fromkeys(layer.kind for layer in self.layers))
        return (*own, kinds, self.parallel.describe())

    def forward(self, input_ids: Tensor, kv_cache: KVCache, *groups: AttentionMetadata) -> Tensor:
        """Run a step. Call it under torch.inference_mode.

        Args:
            input_ids: [T] int32 or int64.
            kv_cache: for cache_layers; this step's tokens are written.
            groups: the step's ragged batch, once for each of the cache's groups of layers, which differ in
                block table, slots and plan. On a GPU a token without a slot may get no experts.

        Returns:
            [T, hidden] for compute_logits: the residual stream after the last layer.

        Raises:
            InvalidArgumentError: (on a CPU) the arguments do not fit each other or the network.
        """
        hidden = self.embed_tokens(input_ids)
        metadata = groups[0]
        if not hidden.is_cuda:
            self._check_step(input_ids, kv_cache, metadata)
        step = make_step(
            kv_cache,
            groups,
            num_heads=self.num_heads,
            impl=self.attention_impl,
            dtype=hidden.dtype,
            deterministic=self.deterministic,
        )
        rotations = [step.rotations(rope, metadata.positions) for rope in self.ropes]
        if self.stack is not None and (steps := cpu_steps(step)):
            run_layers(steps, kv_cache, self.stack, hidden, rotations)
            return hidden
        # Graphs on GPUs have padding; that of one token has none.
        slots = metadata.slot_mapping if hidden.is_cuda and len(hidden) > 1 else None
        given = None if self.layer_inputs is None else self.layer_inputs(input_ids, hidden)
        delta = None
        for index, layer in enumerate(self.layers):
            layer_input = None if given is None else given[:, index]
            delta = layer(hidden, delta, rotations, step, slots, layer_input)
        if delta is None:
            return hidden
        if (scale := self.layers[-1].scale) != 1.0:
            hidden.mul_(scale)
        # A norm of the output has summed it over ranks.
        return hidden.add_(delta if self.config.has_post_norms else self.parallel.all_reduce(delta))

    def _check_step(self, input_ids: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Check what C takes for granted."""
        num_tokens, num_positions = input_ids.shape[0], metadata.positions.shape[0]
        if num_tokens != num_positions:
            raise InvalidArgumentError(f"got {num_tokens} input_ids for {num_positions} positions")
        found = [tuple(kv_cache.layer(index).k.shape[2:]) for index in range(kv_cache.num_layers)]
        needed = [layer.shape for layer in self.cache_layers]
        if found[: len(needed)] != needed:
            raise InvalidArgumentError(
                f"the KV cache is of {_say_layers(found)}, the network of {_say_layers(needed)}"
            )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [R, vocab size] logits of [R, hidden] rows of forward's result; dtype: see LMHead."""
        return self.lm_head(hidden)


def _say_layers(shapes: Sequence[tuple[int, ...]]) -> str:
    """Say how many layers have which kv heads."""
    return " and ".join(
        f"{number} layers with {num_kv_heads} kv heads x {head_dim}"
        for (num_kv_heads, head_dim), number in Counter(shapes).items()
    )
