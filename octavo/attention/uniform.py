"""Attention of sequences with equally many query tokens, in one call without metadata."""

import torch
from torch import Tensor

from octavo.attention import gpu_paged
from octavo.attention.cache import LayerCache
from octavo.attention.checks import check_attention, check_num_splits, check_uniform
from octavo.attention.implementations import choose_for_call, implementation
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import MOST_UNIFORM


def uniform_attention_with_lse(
    q: Tensor,
    cache: LayerCache,
    seq_lens: Tensor,
    block_table: Tensor,
    options: ScoreOptions,
    *,
    query_len: int,
    max_seq_len: int,
    kv_begin: Tensor | None = None,
    num_splits: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend the last query_len tokens of each sequence to its keys; see paged_attention_with_lse.

    On a GPU the map of the work takes one launch, where paged_attention_with_lse takes three for a single
    layer. Nothing waits for the device.

    Args:
        q: [S * query_len, H, D] queries, sequence after sequence.
        cache: one layer's cache.
        seq_lens: [S] int32 or int64, end of each sequence's keys. Where it is less than query_len, the first
            queries have negative positions.
        block_table: [S, max_blocks] int32.
        options: of the scores.
        query_len: query tokens of each sequence.
        max_seq_len: no sequence is longer, such as what a row of the block table holds.
        kv_begin, num_splits: see AttentionMetadata and paged_attention_with_lse.
        impl: "auto" or one of available_impls().

    Returns:
        (out [S * query_len, H, Dv] in the dtype of q, lse [S * query_len, H] float32), as
        paged_attention_with_lse.

    Raises:
        InvalidArgumentError: a shape, dtype, device, option or length does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_num_splits(num_splits)
    check_uniform(q, cache, seq_lens, block_table, options, query_len, max_seq_len, kv_begin)
    chosen = choose_for_call(impl, cache, q.dtype, options)
    if chosen == "triton" and query_len > 0 and 1 <= seq_lens.shape[0] <= MOST_UNIFORM:
        return gpu_paged.uniform_attention_with_lse(
            q,
            cache,
            seq_lens,
            block_table,
            options,
            query_len=query_len,
            max_seq_len=max_seq_len,
            kv_begin=kv_begin,
            num_splits=num_splits,
        )
    metadata = _metadata(seq_lens, block_table, query_len, max_seq_len, kv_begin)
    check_attention(q, cache, metadata, options)
    on_gpu = {"num_splits": num_splits} if chosen == "triton" else {}
    return implementation(chosen).paged_attention_with_lse(q, cache, metadata, options, **on_gpu)


def _metadata(
    seq_lens: Tensor, block_table: Tensor, query_len: int, max_seq_len: int, kv_begin: Tensor | None
) -> AttentionMetadata:
    token = torch.arange(query_len, device=seq_lens.device)
    positions = (seq_lens.unsqueeze(1) - query_len + token).flatten().int()
    return AttentionMetadata(
        cu_seqlens_q=torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device) * query_len,
        seq_lens=seq_lens,
        positions=positions,
        # Attention does not read it.
        slot_mapping=positions,
        block_table=block_table,
        max_query_len=query_len,
        max_seq_len=max_seq_len,
        kv_begin=kv_begin,
        may_be_short=True,
    )
