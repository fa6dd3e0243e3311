"""What the public functions do: normalise, append, attend, and shape the results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention import DeviceForest, ForestPlan
from octavo.attention.float8 import FLOAT8
from octavo.errors import InvalidArgumentError
from octavo.ops.append import NewKeys, Rotary
from octavo.ops.arguments import (
    Window,
    count_sequences,
    make_call,
    ragged_keys,
    read_lengths,
    read_queries,
    read_scales,
    read_scores,
    read_table,
    read_window,
)
from octavo.ops.call import Keys
from octavo.ops.checks import check_device, check_dtype, check_keys, check_shape, integers
from octavo.ops.custom_ops import append, attend

Plan = ForestPlan | DeviceForest | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options that all public functions share, as they were given."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None
    s_aux: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of queries and keys, as they were given; see flash_attn_varlen_func."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where a cache holds each sequence, as it was given; see flash_attn_with_kvcache."""

    cache_seqlens: Tensor | int | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class News:
    """New keys and their rotary embedding, as they were given; see flash_attn_with_kvcache."""

    k: Tensor | None = None
    v: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None


def run_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    news: News,
    places: Places,
    lengths: Lengths,
    options: Options,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> tuple[Tensor, Tensor]:
    """Append to a paged or dense cache and attend; see flash_attn_with_kvcache. Returns (out, lse)."""
    num, cu_seqlens_q = count_sequences(q, lengths.cu_seqlens_q)
    layout = "[B, S, KH, D]" if places.block_table is None else "[num_blocks, block size, KH, D]"
    for name, cache in zip(names, (k_cache, v_cache), strict=True):
        check_shape(name, cache, layout, [None] * 4)
    check_keys(names, q, k_cache, v_cache)
    window = read_window(options.window_size, causal=options.causal)
    table = read_table(q, names[0], k_cache, num, places.block_table, places.cache_batch_idx)
    capacity = table.shape[1] * k_cache.shape[1]
    seq_lens = read_lengths("cache_seqlens", places.cache_seqlens, capacity, q, num)
    begin = places.cache_leftpad
    if begin is not None:
        begin = integers("cache_leftpad", begin, q, "[B]", [num])
    scores = _scores(q, num, window, options)
    scale, k_scale, v_scale = _scales(q, k_cache, num, options)
    new = _new_keys(q, k_cache, v_cache, news, places, seq_lens, table, (k_scale, v_scale))
    q = _readable(q)
    if new is not None:
        news_advance = any(side is not None for side in window)
        rotary = _rotary(q, news, seq_lens, advance=news_advance)
        more = new.length if new.cu_seqlens is None else new.cu_seqlens[1:] - new.cu_seqlens[:-1]
        seq_lens = seq_lens + more
    queries = read_queries(
        *(q, seq_lens),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=lengths.max_seqlen_q,
        seqused_q=lengths.seqused_q,
    )
    if new is not None:
        queries = queries.replaced(append(queries, new, k_cache, v_cache, rotary))
    keys = Keys(k_cache, v_cache, table, seq_lens, begin, scale, v_scale)
    out, lse = attend(make_call(queries, keys, scores, options.num_splits, options.plan))
    return _shaped(out, lse, num, is_ragged=cu_seqlens_q is not None)


def run_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    block_table: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend to ragged or paged keys; see flash_attn_varlen_func. Returns (out, lse)."""
    num, cu_seqlens_q = count_sequences(q, lengths.cu_seqlens_q)
    check_keys(("k", "v"), q, k, v)
    _check_maximum("max_seqlen_q", lengths.max_seqlen_q)
    _check_maximum("max_seqlen_k", lengths.max_seqlen_k)
    window = read_window(options.window_size, causal=options.causal)
    seqused_k = lengths.seqused_k
    if seqused_k is not None:
        seqused_k = integers("seqused_k", seqused_k, q, "[B]", [num])
    scores = _scores(q, num, window, options)
    scale, _, v_scale = _scales(q, k, num, options)
    begin = None
    if block_table is None and lengths.cu_seqlens_k is not None:
        k, v, table, seq_lens, begin = ragged_keys(q, k, v, lengths.cu_seqlens_k, seqused_k, num)
    else:
        table, seq_lens = _paged_keys(q, k, num, block_table, lengths.cu_seqlens_k, seqused_k)
    queries = read_queries(
        *(_readable(q), seq_lens),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=lengths.max_seqlen_q,
        seqused_q=lengths.seqused_q,
    )
    keys = Keys(k, v, table, seq_lens, begin, scale, v_scale)
    out, lse = attend(make_call(queries, keys, scores, options.num_splits, options.plan))
    return _shaped(out, lse, num, is_ragged=cu_seqlens_q is not None)


def _paged_keys(
    q: Tensor,
    k: Tensor,
    num: int,
    block_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (block table [S, W], seq_lens [S]) of paged keys, or of dense ones with seqused_k."""
    name = "[B, Sk, KH, D]" if block_table is None else "[num_blocks, block size, KH, D]"
    check_shape("k", k, name, [None] * 4)
    table = read_table(q, "k", k, num, block_table, None)
    if seqused_k is not None:
        return table, seqused_k
    if cu_seqlens_k is None:
        raise InvalidArgumentError("the lengths of k are missing: give cu_seqlens_k or seqused_k")
    cu_seqlens_k = integers("cu_seqlens_k", cu_seqlens_k, q, "[B + 1]", [num + 1])
    return table, cu_seqlens_k[1:] - cu_seqlens_k[:-1]


def _new_keys(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    news: News,
    places: Places,
    cached_lens: Tensor,
    block_table: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
) -> NewKeys | None:
    """Check and return the new keys and values, or None."""
    k, v, cu_seqlens = news.k, news.v, news.cu_seqlens_k_new
    if k is None or v is None:
        named = {"k": k, "v": v, "cu_seqlens_k_new": cu_seqlens, "rotary_cos": news.rotary_cos}
        named |= {"rotary_sin": news.rotary_sin, "rotary_seqlens": news.rotary_seqlens}
        given = [name for name, value in named.items() if value is not None]
        if given:
            raise InvalidArgumentError(f"{given[0]} was given without both k and v, the keys to append")
        return None
    if places.cache_seqlens is None:
        raise InvalidArgumentError("cache_seqlens is missing: it says where in the cache k and v go")
    num, num_kv_heads = cached_lens.shape[0], k_cache.shape[2]
    lead: list[int | None] = [num, None] if cu_seqlens is None else [None]
    layout = "[B, Sn, KH, D]" if cu_seqlens is None else "[Tn, KH, D]"
    check_shape("k", k, layout, [*lead, num_kv_heads, k_cache.shape[3]])
    check_shape("v", v, layout, [*k.shape[:-2], num_kv_heads, v_cache.shape[3]])
    for name, tensor in (("k", k), ("v", v)):
        check_device(name, tensor, q)
        if k_cache.dtype != FLOAT8:
            check_dtype(name, tensor, k_cache.dtype)
    length = 0
    if cu_seqlens is None:
        length = k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        cu_seqlens = integers("cu_seqlens_k_new", cu_seqlens, q, "[B + 1]", [num + 1])
    return NewKeys(k, v, cu_seqlens, length, cached_lens, block_table, *scales)


def _rotary(q: Tensor, news: News, cached_lens: Tensor, *, advance: bool) -> Rotary | None:
    """Check and return the rotary embedding, or None."""
    cos, sin, seqlens = news.rotary_cos, news.rotary_sin, news.rotary_seqlens
    if cos is None or sin is None:
        if cos is not None or sin is not None or seqlens is not None:
            raise InvalidArgumentError("rotary_cos and rotary_sin must be given together")
        return None
    check_shape("rotary_cos", cos, "[positions, rotary dim / 2]", [None, None])
    check_shape("rotary_sin", sin, "[positions, rotary dim / 2], like rotary_cos", cos.shape)
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_device(name, table, q)
        if not table.is_floating_point():
            raise InvalidArgumentError(f"{name} must hold floats; got {table.dtype}")
    if 2 * cos.shape[1] > q.shape[-1]:
        raise InvalidArgumentError(
            f"the rotary dim, 2 * {cos.shape[1]}, must not exceed the head dim {q.shape[-1]}"
        )
    if seqlens is None:
        seqlens = cached_lens
    else:
        seqlens = integers("rotary_seqlens", seqlens, q, "[B]", [cached_lens.shape[0]])
    return Rotary(cos, sin, news.rotary_interleaved, seqlens, advance)


def _readable(q: Tensor) -> Tensor:
    """Return q; float8 as bfloat16, which holds each of its numbers."""
    return q.to(torch.bfloat16) if q.dtype == FLOAT8 else q


def _scores(q: Tensor, num: int, window: tuple[int | None, int | None], options: Options):
    return read_scores(
        *(q, num, window),
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        s_aux=options.s_aux,
    )


def _scales(q: Tensor, k: Tensor, num: int, options: Options):
    return read_scales(q, k, num, options.q_descale, options.k_descale, options.v_descale)


def _check_maximum(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, Tensor) or value < 0):
        raise InvalidArgumentError(f"{name} must be a number of tokens on the host; got {value!r}")


def _shaped(out: Tensor, lse: Tensor, num: int, *, is_ragged: bool) -> tuple[Tensor, Tensor]:
    """Return out as q was and lse [B, H, Sq], or [H, T] of ragged queries."""
    if is_ragged:
        return out, lse.T
    length = out.shape[0] // num if num else 0
    return out.unflatten(0, (num, length)), lse.unflatten(0, (num, length)).transpose(1, 2)
