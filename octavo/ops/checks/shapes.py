"""The checks of a whole call that need no tensor's numbers; see octavo.ops.call for the groups they take."""

from numbers import Real

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8
from octavo.attention.checks import check_num_splits, check_writable
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError
from octavo.ops.call import Caches, Lengths, News, Options, Places
from octavo.ops.checks.refusals import (
    check_device,
    check_dtype,
    check_floats,
    check_integers,
    check_keys,
    check_queries,
    check_shape,
    check_tensor,
)
from octavo.ops.checks.signature import once

_NEW_KEYS = (torch.float16, torch.bfloat16, torch.float32, FLOAT8)
"""What a float8 cache takes."""

_LARGEST = torch.finfo(torch.float32).max


@once
def check_cached(
    names: tuple[str, str], caches: Caches, news: News, places: Places, lengths: Lengths, options: Options
) -> int:
    """Check a call over a paged or dense cache of these names; return the number of sequences.

    An int in places.cache_seqlens is not looked at.
    """
    q, k_cache, v_cache = caches
    num = _check_queries(q, lengths)
    layout = "[B, S, KH, D]" if places.block_table is None else "[num_blocks, block size, KH, D]"
    for name, cache in zip(names, caches[1:], strict=True):
        check_shape(name, cache, layout, [None] * 4)
    check_keys(names, q, k_cache, v_cache)
    if places.cache_batch_idx is not None:
        check_integers("cache_batch_idx", places.cache_batch_idx, q, "[B]", [num])
    if places.block_table is not None:
        num_rows = num if places.cache_batch_idx is None else None
        check_integers("block_table", places.block_table, q, "[B, max_blocks]", [num_rows, None])
    elif places.cache_batch_idx is None:
        check_shape(names[0], k_cache, "[B, S, KH, D]", [num, None, None, None])
    if isinstance(places.cache_seqlens, Tensor):
        check_integers("cache_seqlens", places.cache_seqlens, q, "[B]", [num])
    if places.cache_leftpad is not None:
        check_integers("cache_leftpad", places.cache_leftpad, q, "[B]", [num])
    _check_options(q, k_cache, num, options)
    _check_new(caches, num, news)
    return num


@once
def check_ragged(caches: Caches, lengths: Lengths, tables: tuple[Tensor | None], options: Options) -> int:
    """Check a call over ragged keys or, by a block table, paged ones; return the number of sequences."""
    (q, k, v), (block_table,) = caches, tables
    num = _check_queries(q, lengths)
    check_keys(("k", "v"), q, k, v)
    if lengths.seqused_k is not None:
        check_integers("seqused_k", lengths.seqused_k, q, "[B]", [num])
    _check_options(q, k, num, options)
    if block_table is None and lengths.cu_seqlens_k is not None:
        check_shape("k", k, "[Tk, KH, D]", [None, None, q.shape[-1]])
    elif block_table is None:
        check_shape("k", k, "[B, Sk, KH, D]", [num, None, None, None])
    else:
        check_shape("k", k, "[num_blocks, block size, KH, D]", [None] * 4)
        check_integers("block_table", block_table, q, "[B, max_blocks]", [num, None])
    if lengths.cu_seqlens_k is not None:
        check_integers("cu_seqlens_k", lengths.cu_seqlens_k, q, "[B + 1]", [num + 1])
    elif lengths.seqused_k is None:
        raise InvalidArgumentError("the lengths of k are missing: give cu_seqlens_k or seqused_k")
    return num


def _check_queries(q: Tensor, lengths: Lengths) -> int:
    """Check q and its lengths; return the number of sequences."""
    cu_seqlens_q = lengths.cu_seqlens_q
    if cu_seqlens_q is None:
        check_queries(q, "[B, Sq, H, D]")
        num = q.shape[0]
    else:
        check_queries(q, "[T, H, D]")
        check_integers("cu_seqlens_q", cu_seqlens_q, q, "[B + 1]", [None])
        num = cu_seqlens_q.shape[0] - 1
        if num < 0:
            raise InvalidArgumentError("cu_seqlens_q must be [B + 1] and begin at 0; got [0]")
    if lengths.seqused_q is not None:
        check_integers("seqused_q", lengths.seqused_q, q, "[B]", [num])
    return num


def _check_options(q: Tensor, k: Tensor, num_sequences: int, options: Options) -> None:
    scale = options.softmax_scale
    if scale is not None and not (isinstance(scale, Real) and abs(scale) <= _LARGEST):
        raise InvalidArgumentError(f"softmax_scale must be a finite float32 number; got {scale!r}")
    ScoreOptions(1.0, softcap=options.softcap)  # It checks.
    check_num_splits(options.num_splits)
    num_heads, slopes = q.shape[-2], options.alibi_slopes
    if slopes is not None:
        check_tensor("alibi_slopes", slopes)
        shape = [num_sequences, num_heads] if slopes.dim() == 2 else [num_heads]
        check_floats("alibi_slopes", slopes, q, "[H] or [B, H]", shape)
    if options.s_aux is not None:
        check_floats("s_aux", options.s_aux, q, "[H]", [num_heads])
    for name in ("q_descale", "k_descale", "v_descale"):
        descale = getattr(options, name)
        if descale is None:
            continue
        if k.dtype != FLOAT8:
            raise InvalidArgumentError(f"{name} is for float8_e4m3fn keys and values, these are {k.dtype}")
        check_floats(name, descale, q, "[B, KH]", [num_sequences, k.shape[-2]])


def _check_new(caches: Caches, num_sequences: int, news: News) -> None:
    q, k_cache, v_cache = caches
    k, v, cu_seqlens = news.k, news.v, news.cu_seqlens_k_new
    if k is None or v is None:
        for name, value in zip(news._fields, news, strict=True):
            if value is not None and name != "rotary_interleaved":
                raise InvalidArgumentError(f"{name} was given without both k and v, the keys to append")
        return
    lead: list[int | None] = [num_sequences, None] if cu_seqlens is None else [None]
    layout = "[B, Sn, KH, D]" if cu_seqlens is None else "[Tn, KH, D]"
    check_shape("k", k, layout, [*lead, *k_cache.shape[2:]])
    check_shape("v", v, layout, [*k.shape[:-2], *v_cache.shape[2:]])
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_writable(name, cache)
    for name, tensor in (("k", k), ("v", v)):
        check_device(name, tensor, q)
        check_dtype(name, tensor, k.dtype if k_cache.dtype == FLOAT8 else k_cache.dtype)
    if k_cache.dtype == FLOAT8 and k.dtype not in _NEW_KEYS:
        raise InvalidArgumentError(
            f"new keys of a float8 cache must be float16, bfloat16, float32 or float8_e4m3fn; got {k.dtype}"
        )
    if cu_seqlens is not None:
        check_integers("cu_seqlens_k_new", cu_seqlens, q, "[B + 1]", [num_sequences + 1])
    _check_rotary(q, num_sequences, news)


def _check_rotary(q: Tensor, num_sequences: int, news: News) -> None:
    cos, sin, seqlens = news.rotary_cos, news.rotary_sin, news.rotary_seqlens
    if cos is None or sin is None:
        if cos is not None or sin is not None or seqlens is not None:
            raise InvalidArgumentError("rotary_cos and rotary_sin must be given together")
        return
    check_shape("rotary_cos", cos, "[positions, rotary dim / 2]", [None, None])
    check_shape("rotary_sin", sin, "[positions, rotary dim / 2], like rotary_cos", cos.shape)
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_device(name, table, q)
        if not table.is_floating_point():
            raise InvalidArgumentError(f"{name} must hold floats; got {table.dtype}")
    if not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        raise InvalidArgumentError(
            f"the rotary dim, 2 * {cos.shape[1]}, must be 2 to the head dim {q.shape[-1]}"
        )
    if seqlens is not None:
        check_integers("rotary_seqlens", seqlens, q, "[B]", [num_sequences])
