"""flash_attn_with_kvcache: append to a cache, rotate, and attend, in one call."""

from typing import Any, Literal, overload

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.ops.arguments import Window, read_window
from octavo.ops.checks.refusals import check_forward_only, refuse
from octavo.ops.given import Lengths, News, Options, Places, Plan
from octavo.ops.run import run_cached, shape_lse


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: Literal[False] = False, *, qv: Tensor | None = None,
    page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, seqused_q: Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None, plan: Plan = None,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, *, return_softmax_lse: Literal[True], qv: Tensor | None = None,
    page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, seqused_q: Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None, plan: Plan = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False, *, qv: Tensor | None = None,
    page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, seqused_q: Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None, plan: Plan = None,
) -> Any: ...  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    seqused_q: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    plan: Plan = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to the cache in place if given, rotate them and q, and attend.

        keys of a sequence   |-- leftpad: unseen --|---- cached ----|-- k, v appended --|
        queries, bottom-right aligned:                       |----------- q ------------|

    Sq is the length of q, L the number of a sequence's keys including appended ones, all positions count
    from the start of its cache. Query i is at p = L - Sq + i, so the last query is at the last key. A query
    that sees nothing gives 0, and lse -inf.

    Args:
        q: [B, Sq, H, D], or [T, H, D] with cu_seqlens_q; float16, bfloat16, float32, float8_e4m3fn, or
            float64 on a CPU. Head dims are 1 to 256.
        k_cache: [B, S, KH, D], or [num_blocks, block size, KH, D] with a block table; any strides, any block
            size. The dtype of q, or float8_e4m3fn.
        v_cache: like k_cache; its head dim Dv may differ.
        k: [B, Sn, KH, D], or [Tn, KH, D] with cu_seqlens_k_new: written to the cache from cache_seqlens on.
        v: like k, head dim Dv.
        rotary_cos, rotary_sin: [positions, rotary dim / 2]: rotate the first rotary dim of k, and of q. Keys
            are at cache_seqlens + i; so are queries if causal or in a window, otherwise all are at
            cache_seqlens, as in flash-attention. Needs k and v.
        cache_seqlens: tokens in the cache before the call, one int or [B] int32; None: the cache is full.
            Less than 0 marks an empty sequence, as in a padded batch: its k and v go nowhere, its block ids
            are not read, and its queries see nothing.
        cache_batch_idx: [B] int32, the row of the cache, or of the block table, of each sequence.
        cache_leftpad: [B] int32, each sequence's first key; None: 0.
        block_table: [B, max_blocks] int32, the blocks of each sequence; entries past its end are not read.
        softmax_scale: factor of q.k; None: 1 / sqrt(D).
        causal: a query sees keys up to its own position.
        window_size: (left, right), a pair, list or CPU tensor: a query sees the keys p - left to p + right;
            -1: all. Causal makes right 0.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        rotary_interleaved: rotate dimensions (2 i, 2 i + 1) together, else the two halves of the rotary dim.
        alibi_slopes: [H] or [B, H] float32; adds -slope * |p - j| to the score of key j.
        num_splits: parts in which keys are read; 0: chosen, 1: not split.
        return_softmax_lse: also return lse, the natural logarithm of the sum of exponentials.
        page_table: FlashAttention-3's name of block_table.
        cu_seqlens_q: [B + 1] int32, cumulative query lengths: q is ragged.
        cu_seqlens_k_new: [B + 1] int32, cumulative numbers of new keys: k and v are ragged.
        max_seqlen_q: at least the longest ragged query, in tokens; None: all of q.
        seqused_q: [B] int32, the first queries of each sequence that count; the others get 0 and -inf.
        rotary_seqlens: [B] int32, used for rotary positions in place of cache_seqlens.
        q_descale, k_descale, v_descale: [B, KH] float32, what 1.0 stands for in q and a float8 cache. New
            keys are divided by theirs.
        qv, attention_chunk: refused.
        scheduler_metadata, pack_gqa, sm_margin: accepted; they change no result.
        s_aux: [H] attention sinks: a score that takes part in each softmax, and in lse, without a value.
        plan: which blocks the sequences share, to read them once; never needed.

    Returns:
        out [B, Sq, H, Dv] or [T, H, Dv] in the dtype of q (bfloat16 for float8), or (out, lse [B, H, Sq] or
        [H, T] float32).

    Raises:
        InvalidArgumentError: an argument does not fit the others, is not supported, or (on a CPU) a length or
            a block id is out of range.
    """
    check_forward_only(q, k_cache, v_cache, k, v)
    refuse(qv=qv, attention_chunk=attention_chunk)
    if page_table is not None:
        if block_table is not None:
            raise InvalidArgumentError("page_table and block_table are two names of one argument; give one")
        block_table = page_table
    options = Options(
        *(softmax_scale, *read_window(window_size, causal=causal), softcap, alibi_slopes, s_aux),
        *(q_descale, k_descale, v_descale, num_splits),
    )
    out, lse = run_cached(
        (q, k_cache, v_cache),
        News(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        Places(cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        Lengths(cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q),
        options,
        max_seqlen_q=max_seqlen_q,
        plan=plan,
    )
    return (out, shape_lse(lse, q)) if return_softmax_lse else out
