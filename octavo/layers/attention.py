"""The attention layer: project, normalise heads, rotate, store, attend, project back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache, paged_attention, store_kv
from octavo.attention.interface import choose_impl
from octavo.errors import ConfigError
from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary, rotate_
from octavo.layers.steps.cpu import CpuStep, can_prepare


class AttentionStep(Protocol):
    """One step's attention over the cache, for any layer."""

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """Return the rotations of [T] positions in the form that attend takes."""
        ...

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend.

        Args:
            qkv: [T, (H + 2 KH) * D] contiguous: q heads, k heads, v heads; may be overwritten.
            rotations: as self.rotations gave them.
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
        k_cache, v_cache = self.kv_cache.layer(options.layer)
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_and_k = heads[:, : self.num_heads + num_kv_heads]
        if options.qk_norm is not None:
            options.qk_norm.apply_(q_and_k)
        rotate_(q_and_k, rotations)
        q, k, v = heads.split((self.num_heads, num_kv_heads, num_kv_heads), 1)
        k_scale, v_scale = self.kv_cache.layer_scales(options.layer)
        store_kv(
            k,
            v,
            k_cache,
            v_cache,
            self.metadata.slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
            impl=self.impl,
        )
        out = paged_attention(
            q,
            k_cache,
            v_cache,
            self.metadata,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            k_scale=k_scale,
            v_scale=v_scale,
            impl=self.impl,
        )
        return out.flatten(1)


def make_step(
    kv_cache: KVCache, metadata: AttentionMetadata, *, num_heads: int, impl: str, deterministic: bool = False
) -> AttentionStep:
    """Return the fastest AttentionStep that `impl` allows.

    Args:
        kv_cache: all layers.
        metadata: the step.
        num_heads: H.
        impl: attention implementation.
        deterministic: a token's result must not depend on what else is in the step; "triton" alone can.

    Raises:
        ConfigError: deterministic, and `impl` is not "triton" here.
    """
    if not deterministic and can_prepare(kv_cache, impl):
        return CpuStep(kv_cache, metadata, num_heads=num_heads)
    if choose_impl(impl, kv_cache.data.device.type, kv_cache.data.dtype) == "triton":
        from octavo.layers.steps.triton import TritonStep

        return TritonStep(kv_cache, metadata, num_heads=num_heads, deterministic=deterministic)
    if deterministic:
        raise ConfigError(
            f'deterministic=True needs attention_impl="triton" on an NVIDIA GPU, got {impl!r} on '
            f"{kv_cache.data.device}; use deterministic=False"
        )
    return OperatorStep(kv_cache, metadata, num_heads, impl)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One rank's attention heads of one layer.

    Attributes:
        qkv_proj: to [T, (num_heads + 2 num_kv_heads) * D]: q heads, k heads, v heads, the halves of q and k
            interleaved (see rotary).
        o_proj: from [T, num_heads * D].
        options: what attention needs to know of the layer.
    """

    qkv_proj: BlockInput
    o_proj: BlockOutput
    options: LayerOptions

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotations: Sequence[Tensor], step: AttentionStep
    ) -> Tensor | None:
        """Attend.

        Args:
            hidden: [T, hidden] residual stream; mutated.
            delta: [T, hidden] still to be added to it, or None.
            rotations: the step's, one per rope of the network.
            step: attention over the cache; this step's keys and values are written to it.

        Returns:
            [T, hidden] still to be added to the residual stream, or None.
        """
        qkv = self.qkv_proj(hidden, delta)
        return self.o_proj(step.attend(qkv, rotations[self.options.rope], self.options), hidden)
