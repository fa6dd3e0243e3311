"""What the public functions do: check, normalise, append and attend."""

import torch
from torch import Tensor

from octavo.attention.float8 import FLOAT8
from octavo.errors import InvalidArgumentError
from octavo.ops.append import NewKeys, Rotary
from octavo.ops.arguments import (
    check_maximum,
    check_plan,
    int32,
    make_lengths,
    make_scales,
    make_scores,
    make_table,
)
from octavo.ops.call import Call, Keys, Queries
from octavo.ops.checks.shapes import check_cached, check_ragged
from octavo.ops.custom_ops import append, attend
from octavo.ops.given import Caches, Lengths, News, Options, Places, Plan


def run_cached(
    caches: Caches,
    news: News,
    places: Places,
    lengths: Lengths,
    options: Options,
    *,
    max_seqlen_q: int | None = None,
    plan: Plan = None,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> tuple[Tensor, Tensor]:
    """Append to a paged or dense cache and attend; see flash_attn_with_kvcache.

    Returns:
        (out [B, Sq, H, Dv] or [T, H, Dv] as q is, lse [T, H]).
    """
    q, k_cache, v_cache = caches
    cache_seqlens = places.cache_seqlens
    # Its number of tokens must not count as a difference between calls.
    fixed = places if isinstance(cache_seqlens, Tensor) else places._replace(cache_seqlens=None)
    num = check_cached(names, caches, news, fixed, lengths, options)
    check_maximum("max_seqlen_q", max_seqlen_q)
    check_plan(plan)
    table = make_table(q, num, places.block_table, places.cache_batch_idx)
    seq_lens = make_lengths("cache_seqlens", cache_seqlens, table.shape[1] * k_cache.shape[1], q, num)
    begin = None if places.cache_leftpad is None else int32(places.cache_leftpad)
    scale, k_scale, v_scale = make_scales(k_cache, num, options)
    queries = _queries(q, lengths, max_seqlen_q)
    if news.k is not None and news.v is not None:
        if cache_seqlens is None:
            raise InvalidArgumentError("cache_seqlens is missing: it says where in the cache k and v go")
        new = _new_keys(news.k, news.v, news, begin, seq_lens, table, (k_scale, v_scale))
        rotary = _rotary(news, seq_lens, advance=(options.left, options.right) != (None, None))
        seq_lens = new.lengths_after()
        # Everything is checked by now, so that a refused call writes nothing.
        queries = queries.replaced(append(queries, new, k_cache, v_cache, rotary))
    keys = Keys(k_cache, v_cache, table, seq_lens, begin, scale, v_scale)
    out, lse = attend(Call(queries, keys, make_scores(q, options), options.num_splits, plan))
    return _shaped(out, q), lse


def run_ragged(
    caches: Caches,
    lengths: Lengths,
    block_table: Tensor | None,
    options: Options,
    *,
    max_seqlen_q: int | None,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Attend to ragged or paged keys; see flash_attn_varlen_func. Returns (out [T, H, Dv], lse [T, H])."""
    q, k, v = caches
    num = check_ragged(caches, lengths, (block_table,), options)
    check_maximum("max_seqlen_q", max_seqlen_q)
    check_plan(plan)
    begin, seq_lens = None, lengths.seqused_k if lengths.seqused_k is None else int32(lengths.seqused_k)
    scale, _, v_scale = make_scales(k, num, options)
    if lengths.cu_seqlens_k is not None:
        bounds = int32(lengths.cu_seqlens_k)
        if block_table is None:
            # One block holds all sequences.
            begin, seq_lens = bounds[:-1], bounds[1:] if seq_lens is None else bounds[:-1] + seq_lens
            k, v = k.unsqueeze(0), v.unsqueeze(0)
            block_table = torch.zeros(num, 1, dtype=torch.int32, device=q.device)
        elif seq_lens is None:
            seq_lens = bounds[1:] - bounds[:-1]
    assert seq_lens is not None, "one of the lengths was checked to be there"
    table = make_table(q, num, block_table, None)
    keys = Keys(k, v, table, seq_lens, begin, scale, v_scale)
    queries = _queries(q, lengths, max_seqlen_q)
    return attend(Call(queries, keys, make_scores(q, options), options.num_splits, plan))


def shape_lse(lse: Tensor, q: Tensor) -> Tensor:
    """Return lse [T, H] as [B, H, Sq], or [H, T] of ragged queries, contiguous."""
    if q.dim() == 3:
        return lse.T.contiguous()
    return lse.view(*q.shape[:2], lse.shape[1]).transpose(1, 2).contiguous()


def _shaped(out: Tensor, q: Tensor) -> Tensor:
    """Return out [T, H, Dv] in the layout of q."""
    return out if q.dim() == 3 else out.view(*q.shape[:2], *out.shape[1:])


def _queries(q: Tensor, lengths: Lengths, max_seqlen_q: int | None) -> Queries:
    """Return q, dense [S, Sq, H, D] or ragged [T, H, D], as ragged queries."""
    # bfloat16 holds each number of float8.
    readable = q.to(torch.bfloat16) if q.dtype == FLOAT8 else q
    used = None if lengths.seqused_q is None else int32(lengths.seqused_q)
    if lengths.cu_seqlens_q is None:
        length = q.shape[1]
        return Queries(readable.flatten(0, 1), None, used, length, length)
    max_len = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    return Queries(readable, int32(lengths.cu_seqlens_q), used, max_len, 0)


def _new_keys(
    k: Tensor,
    v: Tensor,
    news: News,
    begin: Tensor | None,
    cached_lens: Tensor,
    block_table: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
) -> NewKeys:
    if news.cu_seqlens_k_new is not None:
        cu_seqlens = int32(news.cu_seqlens_k_new)
        return NewKeys(k, v, cu_seqlens, 0, cached_lens, begin, block_table, *scales)
    length = k.shape[1]
    flat = k.flatten(0, 1), v.flatten(0, 1)
    return NewKeys(*flat, None, length, cached_lens, begin, block_table, *scales)


def _rotary(news: News, cached_lens: Tensor, *, advance: bool) -> Rotary | None:
    cos, sin, seqlens = news.rotary_cos, news.rotary_sin, news.rotary_seqlens
    if cos is None or sin is None:
        return None
    return Rotary(
        cos, sin, news.rotary_interleaved, cached_lens if seqlens is None else int32(seqlens), advance
    )
