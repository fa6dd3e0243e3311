"""Attention over sequences that share blocks, in one call from plain arrays."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.checks import check_forward_only
from octavo.attention.implementations import choose_impl
from octavo.attention.interface import paged_attention
from octavo.attention.lengths import check_lengths
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.plan.ranges import concatenated_ranges


def forest_attention(
    q: Tensor,
    cache: LayerCache,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    *,
    scale: float,
    softcap: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attend each query token to its sequence's keys, reading the blocks that sequences share only once.

    The queries are the last tokens of their sequences. Each call makes its own plan. A model with many layers
    instead makes AttentionMetadata once per step and calls paged_attention in each layer.

    Args:
        q, cache, scale, softcap, impl: see paged_attention_with_lse.
        block_tables: [S, max_blocks] int32 on the host; sequences share their equal leading ids.
        seq_lens: [S] int32 on the host, tokens in the cache, including the query tokens.
        cu_seqlens_q: [S + 1] int32 on the host, cumulative query lengths.

    Returns:
        [T, H, D] in the dtype of q.

    Raises:
        InvalidArgumentError: a shape, dtype, device, length or block id does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_forward_only(q)
    seq_lens, cu_seqlens_q, query_lens = check_lengths(seq_lens, cu_seqlens_q)
    metadata = AttentionMetadata(
        cu_seqlens_q=_to_device(cu_seqlens_q, q.device),
        seq_lens=_to_device(seq_lens, q.device),
        positions=_to_device(concatenated_ranges(seq_lens - query_lens, query_lens), q.device),
        slot_mapping=torch.full((q.shape[0],), -1, device=q.device),
        block_table=_to_device(block_tables, q.device),
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )
    arrays = (block_tables, seq_lens, cu_seqlens_q)
    if choose_impl(impl, q.device.type, cache.k.dtype, q.dtype) == "triton":
        work = _device_forest(q, cache, arrays)
    else:
        work = ForestPlan.from_block_tables(*arrays, cache.k.shape[1])
    return paged_attention(q, cache, replace(metadata, work=work), scale=scale, softcap=softcap, impl=impl)


def _device_forest(
    q: Tensor, cache: LayerCache, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> DeviceForest | None:
    forest = DeviceForest(
        max_num_seqs=arrays[1].shape[0],
        max_num_tokens=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=cache.k.shape[2],
        head_dim=q.shape[2],
        block_size=cache.k.shape[1],
        dtype=cache.k.dtype,
        device=q.device,
    )
    plan = forest.plan(*arrays)
    if plan.num_units == 0:
        return None
    forest.upload(plan)
    return forest


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)
