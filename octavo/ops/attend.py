"""Attention of one call: by the kernels of octavo.attention, or by the reference where they have no form."""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, LayerCache, paged_attention_with_lse
from octavo.ops import debug, reference
from octavo.ops.call import Call, Keys, Queries, Scores


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv] in the dtype of q, lse [T, H] float32); see octavo.ops.reference.

    Raises:
        InvalidArgumentError: (on a CPU, or on a GPU with OCTAVO_DEBUG=1) a length or block id is
            out of range.
    """
    q, keys = call.queries.q, call.keys
    is_cpu = q.device.type == "cpu"
    if keys.capacity == 0 or keys.k.shape[0] == 0 or q.shape[0] == 0:
        return _nothing(call)
    if is_cpu and _only_reference(call):
        debug.check_call(call)
        return reference.attend(call)
    if not is_cpu and debug.is_on():
        debug.check_call(call)
    if is_cpu and call.queries.used is not None:
        return _attend_used(call)
    queries, scores = _positive(call.queries, call.scores)
    out, lse = paged_attention_with_lse(
        queries.q,
        _layer(keys),
        _metadata(call),
        scale=scores.scale,
        window=None if scores.left is None else scores.left + 1,
        right=scores.right,
        softcap=scores.softcap,
        alibi_slopes=scores.alibi_slopes,
        num_splits=call.num_splits,
    )
    if queries.used is not None:
        out, lse = _hide_unused(out, lse, queries)
    return reference.add_sinks(out, lse, scores.sinks)


def _attend_used(call: Call) -> tuple[Tensor, Tensor]:
    """Attend only the queries that count, on a CPU: a plan on the host takes the others for the last ones."""
    debug.check_call(call)
    queries, (out, lse) = call.queries, _nothing(call)
    assert queries.used is not None
    lens, begin = queries.used.long(), queries.cu_seqlens[:-1].long()
    bounds = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    token = torch.arange(int(bounds[-1])) + (begin - bounds[:-1]).repeat_interleave(lens)
    positions, max_len = queries.positions[token], int(lens.max())
    used = Queries(queries.q[token], bounds.int(), positions, None, max_len, 0)
    out[token], lse[token] = attend(replace(call, queries=used))
    return out, lse


def _nothing(call: Call) -> tuple[Tensor, Tensor]:
    """Return what queries get that see no key."""
    q = call.queries.q
    out = torch.zeros(*q.shape[:2], call.keys.v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    return reference.add_sinks(out, lse, call.scores.sinks)


def _only_reference(call: Call) -> bool:
    """Say whether a CPU call has more queries than keys somewhere, which a batch of steps cannot have."""
    queries, seq_lens = call.queries, call.keys.seq_lens
    query_lens = queries.cu_seqlens[1:] - queries.cu_seqlens[:-1]
    return bool((seq_lens < query_lens).any())


def _metadata(call: Call) -> AttentionMetadata:
    queries, keys = call.queries, call.keys
    return AttentionMetadata(
        cu_seqlens_q=queries.cu_seqlens,
        seq_lens=keys.seq_lens,
        positions=queries.positions,
        # Nothing is stored by it.
        slot_mapping=queries.positions,
        block_table=keys.block_table,
        max_query_len=queries.max_len,
        max_seq_len=keys.capacity,
        work=call.plan,
        kv_begin=keys.begin,
    )


def _layer(keys: Keys) -> LayerCache:
    """Return the cache with both scales or neither."""
    k_scale, v_scale = keys.k_scale, keys.v_scale
    return LayerCache(keys.k, keys.v, k_scale, v_scale)


def _positive(queries: Queries, scores: Scores) -> tuple[Queries, Scores]:
    """Return queries and scores with a positive scale, which some kernels need."""
    if scores.scale > 0:
        return queries, scores
    if scores.scale == 0:
        return queries.replaced(torch.zeros_like(queries.q)), replace(scores, scale=1.0)
    return queries.replaced(-queries.q), replace(scores, scale=-scores.scale)


def _hide_unused(out: Tensor, lse: Tensor, queries: Queries) -> tuple[Tensor, Tensor]:
    """Give 0 and -inf to the queries of each sequence that do not count."""
    assert queries.used is not None
    token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    row = queries.rows(token)
    unused = (token - queries.cu_seqlens[row] >= queries.used[row]).unsqueeze(1)
    return out.masked_fill(unused.unsqueeze(2), 0.0), lse.masked_fill(unused, -torch.inf)
