"""What the public functions do: check, normalise, append and attend."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8
from octavo.errors import InvalidArgumentError
from octavo.kernels.repeat import Groups, tensors_in
from octavo.ops.arguments import (
    check_maximum,
    check_plan,
    int32,
    make_lengths,
    make_scales,
    make_scores,
    make_table,
)
from octavo.ops.attend import check_plan_fits
from octavo.ops.call import (
    Caches,
    Call,
    Keys,
    Lengths,
    NewKeys,
    News,
    Options,
    Places,
    Plan,
    Queries,
    Rotary,
    is_on_gpu,
)
from octavo.ops.checks import debug
from octavo.ops.checks.shapes import check_cached, check_ragged
from octavo.ops.checks.signature import Alike
from octavo.ops.custom_ops import append, attend


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
    check_maximum("max_seqlen_q", max_seqlen_q)
    check_plan(plan)
    (q, k_cache, _), cached = caches, places.cache_seqlens
    # Its number of tokens must not count as a difference between calls.
    fixed = places if isinstance(cached, Tensor) else places._replace(cache_seqlens=None)
    alike = check_cached(names, caches, news, fixed, lengths, options, also=(max_seqlen_q,))
    if news.k is not None and cached is None:
        raise InvalidArgumentError("cache_seqlens is missing: it says where in the cache k and v go")
    width = 1 if places.block_table is None else places.block_table.shape[1]
    lens = make_lengths("cache_seqlens", cached, width * k_cache.shape[1], q, alike.num_sequences)
    if lens is not cached:
        places = places._replace(cache_seqlens=lens)
    scales = make_scales(k_cache, alike.num_sequences, options)
    sizes = alike.num_sequences, max_seqlen_q, plan
    out, lse = _run(_append_and_attend, alike, (caches, news, places, lengths, options, scales, sizes))
    return out if q.dim() == 3 else out.view(q.shape[:2] + out.shape[1:]), lse


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
    check_maximum("max_seqlen_q", max_seqlen_q)
    check_plan(plan)
    tables, bounds = (block_table,), lengths.cu_seqlens_k
    alike = check_ragged(caches, lengths, tables, options, also=(max_seqlen_q,))
    if block_table is None and bounds is not None and debug.may_read(bounds):
        debug.check_ragged_keys(bounds, lengths.seqused_k, caches[1].shape[0])
    if block_table is not None and bounds is not None:
        if debug.may_read(bounds):
            debug.check_paged_keys(bounds)
        # Only the differences of the cumulative lengths count where keys are paged.
        used = bounds[1:] - bounds[:-1] if lengths.seqused_k is None else lengths.seqused_k
        lengths = lengths._replace(cu_seqlens_k=None, seqused_k=used)
    scales = make_scales(caches[1], alike.num_sequences, options)
    sizes = alike.num_sequences, max_seqlen_q, plan
    return _run(_attend_ragged, alike, (caches, lengths, tables, options, scales, sizes))


def shape_lse(lse: Tensor, q: Tensor) -> Tensor:
    """Return lse [T, H] as [B, H, Sq], or [H, T] of ragged queries, contiguous."""
    if q.dim() == 3:
        return lse.T.contiguous()
    return lse.view(*q.shape[:2], lse.shape[1]).transpose(1, 2).contiguous()


_Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
"""See make_scales."""

_Sizes = tuple[int, int | None, Plan]
"""(number of sequences, max_seqlen_q, plan)."""


def _run(
    function: Callable[..., tuple[Tensor, Tensor]], alike: Alike, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Return function(*groups); on a GPU alike calls are repeated, except with a plan or while debugged."""
    (q, *_), (*_, plan) = groups[0], groups[-1]
    if not is_on_gpu(q) or plan is not None or torch.compiler.is_compiling() or debug.is_on():
        return function(*groups)
    out, lse = alike.repeater.run(function, groups, tensors_in(groups))
    return out, lse


def _append_and_attend(
    caches: Caches,
    news: News,
    places: Places,
    lengths: Lengths,
    options: Options,
    scales: _Scales,
    sizes: _Sizes,
) -> tuple[Tensor, Tensor]:
    """Do what run_cached does, with everything checked, and cache_seqlens a tensor."""
    (q, k_cache, v_cache), (num, max_seqlen_q, plan), seq_lens = caches, sizes, places.cache_seqlens
    assert isinstance(seq_lens, Tensor)
    table = make_table(q, num, places.block_table, places.cache_batch_idx)
    begin = None if places.cache_leftpad is None else int32(places.cache_leftpad)
    scale, k_scale, v_scale = scales
    queries, scores = _queries(q, lengths, max_seqlen_q), make_scores(q, options)
    if news.k is not None and news.v is not None:
        new = _new_keys(news.k, news.v, news, begin, seq_lens, table, (k_scale, v_scale))
        if plan is not None:
            keys = Keys(k_cache, v_cache, table, new.lengths_after(), begin, scale, v_scale)
            check_plan_fits(Call(queries, keys, scores, options.num_splits, plan))
        rotary = _rotary(news, seq_lens, advance=(options.left, options.right) != (None, None))
        # Everything is checked by now, so that a refused call writes nothing.
        rotated, seq_lens = append(queries, new, k_cache, v_cache, rotary)
        queries = queries.replaced(rotated)
    keys = Keys(k_cache, v_cache, table, seq_lens, begin, scale, v_scale)
    return attend(Call(queries, keys, scores, options.num_splits, plan))


def _attend_ragged(
    caches: Caches,
    lengths: Lengths,
    tables: tuple[Tensor | None],
    options: Options,
    scales: _Scales,
    sizes: _Sizes,
) -> tuple[Tensor, Tensor]:
    """Do what run_ragged does, all checked; keys are ragged if there is a cu_seqlens_k, else paged."""
    (q, k, v), (block_table,), (num, max_seqlen_q, plan) = caches, tables, sizes
    begin, seq_lens = None, None if lengths.seqused_k is None else int32(lengths.seqused_k)
    if lengths.cu_seqlens_k is not None:
        # One block holds all sequences.
        bounds = int32(lengths.cu_seqlens_k)
        begin, seq_lens = bounds[:-1], bounds[1:] if seq_lens is None else bounds[:-1] + seq_lens
        k, v = k.unsqueeze(0), v.unsqueeze(0)
        block_table = torch.zeros(num, 1, dtype=torch.int32, device=q.device)
    assert seq_lens is not None, "one of the lengths was checked to be there"
    scale, _, v_scale = scales
    keys = Keys(k, v, make_table(q, num, block_table, None), seq_lens, begin, scale, v_scale)
    queries = _queries(q, lengths, max_seqlen_q)
    return attend(Call(queries, keys, make_scores(q, options), options.num_splits, plan))


def _queries(q: Tensor, lengths: Lengths, max_seqlen_q: int | None) -> Queries:
    """Return q, dense [S, Sq, H, D] or ragged [T, H, D], as ragged queries."""
    # bfloat16 represents every number of float8 exactly.
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
    if k.dtype == FLOAT8:
        # New keys in float8 are in units of the cache's scales already, and exact in bfloat16.
        k, v, scales = k.to(torch.bfloat16), v.to(torch.bfloat16), (None, None)
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
