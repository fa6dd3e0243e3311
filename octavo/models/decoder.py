"""One decoder for all families: what differs between them is data, not code."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.layers import (
    AttentionLayer,
    AttentionStep,
    Embedding,
    FeedForward,
    LMHead,
    RMSNorm,
    Rotary,
    make_step,
)
from octavo.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each between norms and added to the residual stream.

    Attributes:
        attention_norm: of the attention's input.
        attention: the attention block.
        attention_post_norm: of the attention's output, or None.
        feed_forward_norm: of the feed-forward's input.
        feed_forward: the feed-forward block.
        feed_forward_post_norm: of the feed-forward's output, or None.
    """

    attention_norm: RMSNorm
    attention: AttentionLayer
    attention_post_norm: RMSNorm | None
    feed_forward_norm: RMSNorm
    feed_forward: FeedForward
    feed_forward_post_norm: RMSNorm | None

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotations: Sequence[Tensor], step: AttentionStep
    ) -> Tensor:
        """Run the layer.

        Each block's output is added to the residual stream by the norm that reads the sum next: one pass
        over the stream instead of two.

        Args:
            hidden: [T, hidden] residual stream; mutated.
            delta: [T, hidden] still to be added to it, or None.
            rotations: [T, 1, D / 2] complex64, one per rope of the network.
            step: attention over the cache.

        Returns:
            [T, hidden] still to be added to the residual stream.
        """
        out = self.attention(_add_and_norm(self.attention_norm, hidden, delta), rotations, step)
        if self.attention_post_norm is not None:
            out = self.attention_post_norm(out)
        out = self.feed_forward(_add_and_norm(self.feed_forward_norm, hidden, out))
        return out if self.feed_forward_post_norm is None else self.feed_forward_post_norm(out)


@dataclass(frozen=True, slots=True)
class Decoder:
    """One rank's share of a decoder-only transformer.

    Attributes:
        config: the whole network.
        num_heads: query heads of this rank.
        num_kv_heads: kv heads of this rank: what its KV cache must hold.
        attention_impl: see octavo.attention.available_impls.
        embed_tokens: ids to hidden states.
        ropes: config.ropes on the device.
        layers: config.num_layers of them.
        norm: of the last hidden states.
        lm_head: hidden states to logits.
    """

    config: ModelConfig
    num_heads: int
    num_kv_heads: int
    attention_impl: str
    embed_tokens: Embedding
    ropes: tuple[Rotary, ...]
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: LMHead

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Run a step; to be called under torch.inference_mode.

        Args:
            input_ids: [T] int32 or int64.
            positions: [T] int32 or int64, position of each token in its sequence.
            kv_cache: of config.num_layers layers and num_kv_heads kv heads; this step's tokens are written.
            metadata: the step's ragged batch.

        Returns:
            [T, hidden] after the last norm.
        """
        hidden = self.embed_tokens(input_ids)
        rotations = [rope(positions) for rope in self.ropes]
        step = make_step(kv_cache, metadata, num_heads=self.num_heads, impl=self.attention_impl)
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, rotations, step)
        return _add_and_norm(self.norm, hidden, delta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [R, vocab size] float32 logits of [R, hidden] rows of forward's result."""
        return self.lm_head(hidden)


def _add_and_norm(norm: RMSNorm, hidden: Tensor, delta: Tensor | None) -> Tensor:
    return norm(hidden) if delta is None else norm.add_(hidden, delta)
