"""The protocol of a step's attention, and its implementation by the public operators."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache, paged_attention, store_kv
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary, rotate_, rotated_heads


class AttentionStep(Protocol):
    """One step's attention over the cache, for any layer."""

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """Return the rotations of positions [T], in the form that attend takes."""
        ...

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend.

        Args:
            qkv: [T, (H + 2 KH) * D] contiguous: q heads, k heads, v heads; may be overwritten.
            rotations: from self.rotations.
            options: the layer.

        Returns:
            A new [T, H * D].
        """
        ...


@dataclass(frozen=True, slots=True)
class OperatorStep:
    """AttentionStep by the operators of octavo.attention: any device, dtype and implementation.

    Attributes:
        kv_cache: all layers; written.
        metadata: the step.
        num_heads: H.
        impl: attention implementation.
    """

    kv_cache: KVCache
    metadata: AttentionMetadata
    num_heads: int
    impl: str

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """See AttentionStep."""
        return rope(positions)

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """See AttentionStep."""
        cache = self.kv_cache.layer(options.layer)
        num_kv_heads, head_dim = cache.k.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_and_k = heads[:, : self.num_heads + num_kv_heads]
        if options.qk_norm is not None:
            options.qk_norm.apply_(q_and_k)
        for first, number, turns in rotated_heads(rotations, self.num_heads, num_kv_heads):
            rotate_(heads[:, first : first + number], turns)
        q, k, v = heads.split((self.num_heads, num_kv_heads, num_kv_heads), 1)
        store_kv(k, v, cache, self.metadata.slot_mapping, impl=self.impl)
        out = paged_attention(
            q,
            cache,
            self.metadata,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            impl=self.impl,
        )
        return out.flatten(1)
