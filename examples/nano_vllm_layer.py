"""nano-vllm's attention layer over Octavo: its prefill and decode steps, and the same batch in one step."""

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, LayerCache, paged_attention, store_kv
from octavo.ops import flash_attn_varlen_func, flash_attn_with_kvcache

BLOCK_SIZE, SCALE = 4, 32**-0.5  # nano-vllm's blocks are of 256
# Sequence 0 prefills 5 tokens behind a hit of 8; sequences 1 and 2 decode behind 6 and 11 tokens.
BLOCK_TABLES = torch.tensor([[3, 1, 4, 9], [5, 8, 0, 0], [2, 6, 7, 0]], dtype=torch.int32)
CONTEXT_LENS = torch.tensor([13, 7, 12], dtype=torch.int32)
CU_SEQLENS_Q = torch.tensor([0, 5, 6, 7], dtype=torch.int32)
POSITIONS = torch.tensor([8, 9, 10, 11, 12, 6, 11], dtype=torch.int32)
SEQUENCE = torch.tensor([0, 0, 0, 0, 0, 1, 2])


def two_steps(q: Tensor, cache: LayerCache) -> Tensor:
    """Attend as the layer does: a prefill step over the cache, and a decode step."""
    prefill = flash_attn_varlen_func(
        q[:5],
        cache.k,
        cache.v,
        max_seqlen_q=5,
        cu_seqlens_q=CU_SEQLENS_Q[:2],
        max_seqlen_k=13,
        cu_seqlens_k=torch.tensor([0, 13], dtype=torch.int32),
        softmax_scale=SCALE,
        causal=True,
        block_table=BLOCK_TABLES[:1],
    )
    decode = flash_attn_with_kvcache(
        q[5:].unsqueeze(1),
        cache.k,
        cache.v,
        cache_seqlens=CONTEXT_LENS[1:],
        block_table=BLOCK_TABLES[1:],
        softmax_scale=SCALE,
        causal=True,
    )
    return torch.cat([prefill, decode[:, 0]])


def main() -> None:
    torch.manual_seed(0)
    cache = LayerCache(torch.randn(16, BLOCK_SIZE, 2, 32), torch.randn(16, BLOCK_SIZE, 2, 32))
    q, k, v = torch.randn(7, 8, 32), torch.randn(7, 2, 32), torch.randn(7, 2, 32)
    slot_mapping = BLOCK_TABLES[SEQUENCE, POSITIONS // BLOCK_SIZE] * BLOCK_SIZE + POSITIONS % BLOCK_SIZE
    store_kv(k, v, cache, slot_mapping)
    # One step. metadata.work may hold a ForestPlan: then blocks that sequences share are read once.
    metadata = AttentionMetadata(
        cu_seqlens_q=CU_SEQLENS_Q,
        seq_lens=CONTEXT_LENS,
        positions=POSITIONS,
        slot_mapping=slot_mapping,
        block_table=BLOCK_TABLES,
        max_query_len=5,
        max_seq_len=13,
    )
    one, two = paged_attention(q, cache, metadata, scale=SCALE), two_steps(q, cache)
    torch.testing.assert_close(one, two)
    print(f"largest difference between two steps and one: {(one - two).abs().max():.1e}")


if __name__ == "__main__":
    main()
