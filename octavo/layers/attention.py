"""The attention layer: project, normalise heads, rotate, store, attend, project back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache, paged_attention, store_kv
from octavo.attention.interface import choose_impl
from octavo.layers.cpu_step import CpuStep, can_prepare
from octavo.layers.linear import Linear
from octavo.layers.norm import HeadRMSNorm
from octavo.layers.rotary import rotate_
from octavo.parallel import TensorParallel


class AttentionStep(Protocol):
    """One step's attention over the cache, for any layer."""

    def attend(
        self,
        qkv: Tensor,
        rotations: Tensor,
        layer: int,
        *,
        qk_norm: HeadRMSNorm | None,
        scale: float,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend.

        Args:
            qkv: [T, (H + 2 KH) * D] contiguous: q heads, k heads, v heads; may be overwritten.
            rotations: [T, 1, D / 2] complex64.
            layer: index of the cache's layer.
            qk_norm: norm of q and k heads before the rotation, or None.
            scale, window, softcap: see octavo.attention.paged_attention.

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

    def attend(
        self,
        qkv: Tensor,
        rotations: Tensor,
        layer: int,
        *,
        qk_norm: HeadRMSNorm | None,
        scale: float,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """See AttentionStep."""
        k_cache, v_cache = self.kv_cache.layer(layer)
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_and_k = heads[:, : self.num_heads + num_kv_heads]
        if qk_norm is not None:
            qk_norm.apply_(q_and_k)
        rotate_(q_and_k, rotations)
        q, k, v = heads.split((self.num_heads, num_kv_heads, num_kv_heads), 1)
        store_kv(k, v, k_cache, v_cache, self.metadata.slot_mapping, impl=self.impl)
        out = paged_attention(
            q, k_cache, v_cache, self.metadata, scale=scale, window=window, softcap=softcap, impl=self.impl
        )
        return out.flatten(1)


def make_step(kv_cache: KVCache, metadata: AttentionMetadata, *, num_heads: int, impl: str) -> AttentionStep:
    """Return the fastest AttentionStep that `impl` allows."""
    if can_prepare(kv_cache, impl):
        return CpuStep(kv_cache, metadata, num_heads=num_heads)
    if choose_impl(impl, kv_cache.data.device.type, kv_cache.data.dtype) == "triton":
        from octavo.layers.triton_step import TritonStep

        return TritonStep(kv_cache, metadata, num_heads=num_heads)
    return OperatorStep(kv_cache, metadata, num_heads, impl)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One rank's attention heads of one layer.

    Attributes:
        qkv_proj: [T, hidden] to a new [T, (num_heads + 2 num_kv_heads) * D]: q heads, k heads, v heads,
            the halves of q and k interleaved (see rotary).
        o_proj: [T, num_heads * D] to [T, hidden], a part of the sum over ranks.
        qk_norm: norm of q and k heads before the rotation, or None.
        num_heads: query heads of this rank.
        num_kv_heads: kv heads of this rank.
        head_dim: D.
        scale: factor of q.k.
        window: a token sees its last `window` keys, itself included; None: all.
        softcap: bound of the scores; 0: none.
        layer: index of the cache's layer.
        rope: index of its rotary frequencies.
        parallel: this rank.
    """

    qkv_proj: Linear
    o_proj: Linear
    qk_norm: HeadRMSNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float
    layer: int
    rope: int
    parallel: TensorParallel

    def __call__(self, x: Tensor, rotations: Sequence[Tensor], step: AttentionStep) -> Tensor:
        """Attend.

        Args:
            x: [T, hidden].
            rotations: [T, 1, D / 2] complex64, one per rope of the network.
            step: attention over the cache; this step's keys and values are written to it.

        Returns:
            A new [T, hidden].
        """
        out = step.attend(
            self.qkv_proj(x),
            rotations[self.rope],
            self.layer,
            qk_norm=self.qk_norm,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return self.parallel.all_reduce(self.o_proj(out))
