"""Paged attention in plain PyTorch: the specification that every kernel is tested against."""

import torch
from torch import Tensor

from octavo.attention.cache import LayerCache, read_rows, scale_of, write_rows
from octavo.attention.checks import check_blocks, check_slots
from octavo.attention.lengths import check_capacity
from octavo.attention.merge import add_sinks
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv."""
    num_blocks, block_size = cache.k.shape[:2]
    check_slots(slot_mapping, num_blocks * block_size)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            index = (slot // block_size, slot % block_size)
            write_rows(cache.k, index, k[token], cache.k_scale)
            write_rows(cache.v, index, v[token], cache.v_scale)


def paged_attention_with_lse(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend sequence by sequence over dense copies of their keys and values; ignores the plan.

    Computes in float32, or in float64 if q is; see octavo.attention.paged_attention_with_lse.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:2], cache.v.shape[3], dtype=dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    metadata.check_lengths()
    bounds = metadata.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if tokens.start == tokens.stop:
            continue
        block_ids = _block_ids(metadata.block_table, s, seq_len, cache.k)
        keys = _gather(cache.k, block_ids, seq_len, dtype, scale_of(cache.k_scale, s))
        values = _gather(cache.v, block_ids, seq_len, dtype, scale_of(cache.v_scale, s))
        first = 0 if metadata.kv_begin is None else int(metadata.kv_begin[s])
        visible, distance = _see(metadata.positions[tokens], keys.shape[0], first, options)
        slopes = options.alibi_slopes
        bias = None if slopes is None else (slopes[s] if slopes.dim() == 2 else slopes, distance.abs())
        out[tokens], lse[tokens] = attend_sequence(
            q[tokens], keys, values, visible, bias, scale=options.scale, softcap=options.softcap
        )
    return add_sinks(out, lse, options.sinks, q.dtype)


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


def _see(positions: Tensor, num_keys: int, first: int, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Return which query of a sequence sees which key [Q, K], and query minus key position [Q, K]."""
    key = torch.arange(num_keys, device=positions.device)
    distance = positions[:, None] - key
    visible = (key >= first).expand_as(distance).clone()
    if options.right is not None:
        visible &= distance >= -options.right
    if options.window is not None:
        visible &= distance < options.window
    return visible, distance


def attend_sequence(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    bias: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attend one sequence densely: q [Q, H, D], keys [K, KH, D], values; return (out [Q, H, Dv], lse [Q, H]).

    visible: [Q, K] bool.
    bias: (slopes [H], distances [Q, K], not negative), or None.
    """
    # What no query sees may hold anything, even NaN, which a weight of 0 would not silence.
    unseen = ~visible.any(dim=0)[:, None, None]
    group_size = q.shape[1] // keys.shape[1]
    keys = keys.masked_fill(unseen, 0.0).repeat_interleave(group_size, dim=1)
    values = values.masked_fill(unseen, 0.0).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(keys.dtype), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        slopes, distance = bias
        scores = scores - slopes.to(keys.dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return out, lse.T.float()
