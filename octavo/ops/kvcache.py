"""flash_attn_with_kvcache: append to a cache, rotate, and attend, in one call."""

from typing import Any, Literal, overload

from torch import Tensor

from octavo.attention.checks import check_forward_only
from octavo.errors import InvalidArgumentError
from octavo.ops.arguments import Window, read_window
from octavo.ops.call import Lengths, News, Options, Places, Plan
from octavo.ops.checks.refusals import refuse
from octavo.ops.run_call import run_cached, shape_lse


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
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Append k and v to the cache in place if given, rotate them and q, and attend.

    The last query is at the last key, appended ones included. docs/operators.md says who sees which keys, and
    what each argument means that is only given its shape here. Lengths are in tokens, integers int32.

    Args:
        q: [B, Sq, H, D], or [T, H, D] with cu_seqlens_q.
        k_cache: [B, S, KH, D], or [num_blocks, block size, KH, D] with block_table.
        v_cache: like k_cache; its head dim Dv may differ.
        k: [B, Sn, KH, D], or [Tn, KH, D] with cu_seqlens_k_new: written to the cache from cache_seqlens on.
        v: like k, head dim Dv.
        rotary_cos, rotary_sin: [positions, rotary dim / 2].
        cache_seqlens: in the cache before the call, an int or [B]; None: the cache is full; less than 0: the
            sequence is empty and stays so.
        cache_batch_idx, cache_leftpad, seqused_q, rotary_seqlens: [B].
        block_table, page_table: [B, max_blocks]; two names of one argument.
        cu_seqlens_q, cu_seqlens_k_new: [B + 1].
        alibi_slopes: [H] or [B, H] float32.
        s_aux: [H] float.
        q_descale, k_descale, v_descale: [B, KH] float32.
        qv, attention_chunk: refused.
        scheduler_metadata, pack_gqa, sm_margin: accepted; they change no result.
        plan: which blocks the sequences share, to read them once; never needed.

    Returns:
        out [B, Sq, H, Dv] or [T, H, Dv] in the dtype of q (bfloat16 for float8), or (out, lse [B, H, Sq] or
        [H, T] float32).

    Raises:
        InvalidArgumentError: an argument does not fit the others, is not supported, or (on a CPU) a length or
            a block id is out of range.
    """
    check_forward_only(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, s_aux)
    check_forward_only(q_descale, k_descale, v_descale)
    refuse(qv=qv, attention_chunk=attention_chunk)
    if page_table is not None:
        if block_table is not None:
            raise InvalidArgumentError("page_table and block_table are two names of one argument; give one")
        block_table = page_table
    left, right = read_window(window_size, causal=causal)
    options = Options(
        softmax_scale, left, right, softcap, alibi_slopes, s_aux, q_descale, k_descale, v_descale, num_splits
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
