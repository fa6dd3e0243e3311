"""Paged attention in plain PyTorch: the specification that every kernel is tested against."""

import torch
from torch import Tensor

from octavo.attention.checks import check_blocks, check_slots
from octavo.attention.float8 import read_rows, write_rows
from octavo.attention.lengths import check_capacity
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv."""
    block_size = k_cache.shape[1]
    check_slots(slot_mapping, k_cache.shape[0] * block_size)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            write_rows(k_cache, (slot // block_size, slot % block_size), k[token], k_scale)
            write_rows(v_cache, (slot // block_size, slot % block_size), v[token], v_scale)


def paged_attention_with_lse(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend sequence by sequence over dense copies of their keys and values; ignores the plan.

    Computes in float32, or in float64 if q is; see octavo.attention.paged_attention_with_lse.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    metadata.check_lengths()
    bounds = metadata.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if tokens.start == tokens.stop:
            continue
        block_ids = _block_ids(metadata.block_table, s, seq_len, k_cache)
        keys = _gather(k_cache, block_ids, seq_len, dtype, options.k_scale)
        values = _gather(v_cache, block_ids, seq_len, dtype, options.v_scale)
        out[tokens], lse[tokens] = _attend(q[tokens], keys, values, metadata.positions[tokens], options)
    return out, lse


def _block_ids(block_table: Tensor, s: int, seq_len: int, cache: Tensor) -> Tensor:
    """Return the ids of a sequence's blocks, [ceil(seq_len / B)] int64; on a CPU all of them exist."""
    num_blocks, block_size = cache.shape[:2]
    check_capacity(seq_len, block_size, block_table)
    columns = torch.arange(-(-seq_len // block_size), device=cache.device)
    check_blocks(block_table, torch.full_like(columns, s), columns, num_blocks)
    return block_table[s, columns].long()


def _gather(
    cache: Tensor, block_ids: Tensor, seq_len: int, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """Return one sequence's rows of the cache, [seq_len, KH, D] in the dtype of the computation."""
    return read_rows(cache, (block_ids,), dtype, scale).flatten(0, 1)[:seq_len]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Dense attention of one sequence: q [Q, H, D], keys and values [K, KH, D] -> (out, lse [Q, H])."""
    distance = positions[:, None] - torch.arange(keys.shape[0], device=q.device)
    visible = distance >= 0
    if options.window is not None:
        visible &= distance < options.window
    # What no query sees may hold anything, even NaN, which a weight of 0 would not silence.
    unseen = ~visible.any(dim=0)[:, None, None]
    group_size = q.shape[1] // keys.shape[1]
    keys = keys.masked_fill(unseen, 0.0).repeat_interleave(group_size, dim=1)
    values = values.masked_fill(unseen, 0.0).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(keys.dtype), keys) * options.scale
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.to(keys.dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out.to(q.dtype), lse.T.float()
