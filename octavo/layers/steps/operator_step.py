"""The protocol of a step's attention, and its implementation by the public operators."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import rms_norm

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
            qkv: [T, (H + 2 KH) * D] contiguous: q heads, k heads, v heads, or without those that options
                say are absent; may be overwritten.
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
        num_keys = 0 if options.shares_cache else num_kv_heads
        q_and_k = heads[:, : self.num_heads + num_keys]
        v = values_of(heads, num_keys, options)
        if options.qk_norm is not None:
            options.qk_norm.apply_(q_and_k)
        for first, number, turns in rotated_heads(rotations, self.num_heads, num_keys):
            rotate_(heads[:, first : first + number], turns)
        q, k = q_and_k.split((self.num_heads, num_keys), 1)
        if not options.shares_cache:
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


def values_of(heads: Tensor, num_kv_heads: int, options: LayerOptions) -> Tensor:
    """Return the values [T, KH, D] that a layer stores, of its heads [T, .., D] before norm and rotation."""
    v = heads[:, heads.shape[1] - num_kv_heads :]
    if options.keys_are_values:
        v = v.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return v if options.value_norm is None else rms_norm(v, v.shape[-1:], eps=options.value_norm)
