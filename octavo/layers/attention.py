"""The attention layer: project, normalise heads, rotate, store, attend, project back."""

from dataclasses import dataclass

from torch import Tensor

from octavo.attention import AttentionMetadata, paged_attention, store_kv
from octavo.layers.linear import Linear
from octavo.layers.norm import HeadRMSNorm
from octavo.layers.rotary import rotate_
from octavo.parallel import TensorParallel


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
        impl: attention implementation.
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
    impl: str
    parallel: TensorParallel

    def __call__(
        self, x: Tensor, rotations: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend.

        Args:
            x: [T, hidden].
            rotations: [T, 1, D / 2] complex64.
            k_cache: [N, B, KH, D] keys of this layer; this step's are written.
            v_cache: [N, B, KH, D] values, likewise.
            metadata: the step.

        Returns:
            A new [T, hidden].
        """
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(-1, num_rotated + self.num_kv_heads, self.head_dim)
        q_and_k = heads[:, :num_rotated]
        if self.qk_norm is not None:
            self.qk_norm.apply_(q_and_k)
        rotate_(q_and_k, rotations)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        store_kv(k, v, k_cache, v_cache, metadata.slot_mapping, impl=self.impl)
        out = paged_attention(
            q,
            k_cache,
            v_cache,
            metadata,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            impl=self.impl,
        )
        return self.parallel.all_reduce(self.o_proj(out.flatten(1)))
