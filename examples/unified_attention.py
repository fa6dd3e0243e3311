"""Unified attention of a mixed batch: causal, shared and unique partials and their merge, then one call."""

import numpy as np
import torch
from torch import Tensor

from octavo.attention import LayerCache, forest_attention, store_kv
from octavo.ops import flash_attn_combine, flash_attn_varlen_func

# All share blocks 7 and 3, 8 tokens. Sequence 0 prefills 6 more; 1 and 2 decode behind 5 and 3 of their own.
TABLES = np.array([[7, 3, 0, 1], [7, 3, 5, 6], [7, 3, 9, 0]], dtype=np.int32)
SEQ_LENS, CU_SEQLENS_Q = np.array([14, 14, 12], dtype=np.int32), np.array([0, 6, 7, 8], dtype=np.int32)
POSITIONS = np.array([8, 9, 10, 11, 12, 13, 13, 11])


def partials(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> list[tuple[Tensor, Tensor]]:
    """The new tokens among themselves, the blocks that all share, and each sequence's own blocks."""
    cu, shared_cu = torch.from_numpy(CU_SEQLENS_Q), torch.tensor([0, 8], dtype=torch.int32)
    causal = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True, return_softmax_lse=True)
    shared = flash_attn_varlen_func(
        q,
        cache.k,
        cache.v,
        shared_cu,
        max_seqlen_q=8,
        seqused_k=torch.tensor([8], dtype=torch.int32),
        block_table=torch.from_numpy(TABLES[:1, :2]),
        return_softmax_lse=True,
    )
    unique = flash_attn_varlen_func(
        q,
        cache.k,
        cache.v,
        cu,
        max_seqlen_q=6,
        seqused_k=torch.tensor([0, 5, 3], dtype=torch.int32),
        block_table=torch.from_numpy(TABLES[:, 2:]),
        return_softmax_lse=True,
    )
    return [causal, shared, unique]


def main() -> None:
    torch.manual_seed(0)
    cache = LayerCache(torch.randn(16, 4, 2, 32), torch.randn(16, 4, 2, 32))
    q, k, v = torch.randn(8, 4, 32), torch.randn(8, 2, 32), torch.randn(8, 2, 32)
    slots = TABLES[[0] * 6 + [1, 2], POSITIONS // 4] * 4 + POSITIONS % 4
    store_kv(k, v, cache, torch.from_numpy(slots))
    outs, lses = zip(*partials(q, k, v, cache), strict=True)
    assert torch.isneginf(lses[2][:, :6]).all()  # the prefill has no blocks of its own before its new tokens
    merged, _ = flash_attn_combine(torch.stack(outs), torch.stack(lses).transpose(1, 2))
    out = forest_attention(q, cache, TABLES, SEQ_LENS, CU_SEQLENS_Q, scale=32**-0.5)
    torch.testing.assert_close(out, merged, atol=1e-5, rtol=1e-5)
    print(f"largest difference between three partials and one call: {(out - merged).abs().max():.1e}")


if __name__ == "__main__":
    main()
