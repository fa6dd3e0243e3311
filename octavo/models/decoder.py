"""One decoder for all families: what differs between them is data, not code."""

from dataclasses import dataclass

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.layers import AttentionLayer, Embedding, FeedForward, LMHead, RMSNorm, Rotary
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
        self, hidden: Tensor, rotations: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Add this layer to the residual stream.

        Args:
            hidden: [T, hidden], mutated.
            rotations: [T, 1, D / 2] complex64.
            k_cache: [N, B, KH, D] keys of this layer; this step's are written.
            v_cache: [N, B, KH, D] values, likewise.
            metadata: the step.
        """
        out = self.attention(self.attention_norm(hidden), rotations, k_cache, v_cache, metadata)
        hidden.add_(out if self.attention_post_norm is None else self.attention_post_norm(out))
        out = self.feed_forward(self.feed_forward_norm(hidden))
        hidden.add_(out if self.feed_forward_post_norm is None else self.feed_forward_post_norm(out))


@dataclass(frozen=True, slots=True)
class Decoder:
    """One rank's share of a decoder-only transformer.

    Attributes:
        config: the whole network.
        num_kv_heads: kv heads of this rank: what its KV cache must hold.
        embed_tokens: ids to hidden states.
        ropes: config.ropes on the device.
        layers: config.num_layers of them.
        norm: of the last hidden states.
        lm_head: hidden states to logits.
    """

    config: ModelConfig
    num_kv_heads: int
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
        for index, layer in enumerate(self.layers):
            layer(hidden, rotations[self.config.layer_ropes[index]], *kv_cache.layer(index), metadata)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [R, vocab size] float32 logits of [R, hidden] rows of forward's result."""
        return self.lm_head(hidden)
