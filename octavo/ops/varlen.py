"""flash-attention's inference functions of ragged tensors; see octavo.ops.flash."""

from typing import Any, Literal, overload

from torch import Tensor

from octavo.attention.checks import check_forward_only, check_writable
from octavo.ops.arguments import Window, check_maximum, read_window
from octavo.ops.call import Attended, Lengths, Options, Plan
from octavo.ops.checks.refusals import (
    check_device,
    check_dtype,
    check_shape,
    refuse_missing,
)
from octavo.ops.run_call import run_ragged, shape_lse


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, qv: Tensor | None = None,
    q_v: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, scheduler_metadata: Tensor | None = None,
    s_aux: Tensor | None = None, out: Tensor | None = None, return_softmax_lse: Literal[False] = False,
    fa_version: int | None = None, plan: Plan = None,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True], block_table: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, qv: Tensor | None = None, q_v: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    attention_chunk: int = 0, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None, s_aux: Tensor | None = None, out: Tensor | None = None,
    return_softmax_lse: bool = False, fa_version: int | None = None, plan: Plan = None,
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, block_table: Tensor | None = None, *,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, qv: Tensor | None = None,
    q_v: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, scheduler_metadata: Tensor | None = None,
    s_aux: Tensor | None = None, out: Tensor | None = None, return_softmax_lse: Literal[True],
    fa_version: int | None = None, plan: Plan = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, qv: Tensor | None = None, q_v: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    attention_chunk: int = 0, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None, s_aux: Tensor | None = None, out: Tensor | None = None,
    return_softmax_lse: bool = False, fa_version: int | None = None, plan: Plan = None,
) -> Any: ...  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, qv: Tensor | None = None, q_v: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    attention_chunk: int = 0, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None, s_aux: Tensor | None = None, out: Tensor | None = None,
    return_softmax_lse: bool = False, fa_version: int | None = None, plan: Plan = None,
) -> Attended:  # fmt: skip
    """Attend ragged q [T, H, D] to ragged keys [Tk, KH, D], or to paged ones through a block table.

    For the options see flash_attn_with_kvcache. The last query of a sequence is at its last key.

    Args:
        k: [Tk, KH, D] with cu_seqlens_k; [num_blocks, block size, KH, D] with block_table; or
            [B, Sk, KH, D] with seqused_k alone.
        v: like k, head dim Dv.
        cu_seqlens_q: [B + 1] int32, cumulative query lengths.
        cu_seqlens_k: [B + 1] int32, cumulative key lengths; with a block table only their differences count.
        max_seqlen_q: at least the longest query, in tokens; None: all of q.
        max_seqlen_k: accepted; key lengths are read on the device.
        dropout_p: must be 0.
        block_table: [B, max_blocks] int32.
        seqused_q: [B] int32, the first queries of each sequence that count; the others get 0 and -inf, with
            s_aux 0 and their sink.
        seqused_k: [B] int32, the first keys of each sequence that count.
        out: [T, H, Dv], written and returned in place of a new tensor.
        return_attn_probs: return (out, lse [H, T], None).
        return_softmax_lse: return (out, lse [H, T]).
        deterministic, pack_gqa, sm_margin, scheduler_metadata, fa_version: accepted; they change no result.
        plan: which blocks the sequences share, to read them once; never needed.

    Raises:
        InvalidArgumentError: an argument does not fit the others, or is not supported.
    """
    refuse_missing(dropout_p, qv, attention_chunk, q_v=q_v)
    check_forward_only(q, k, v, alibi_slopes, s_aux, q_descale, k_descale, v_descale, out)
    check_maximum("max_seqlen_k", max_seqlen_k)
    left, right = read_window(window_size, causal=causal)
    options = Options(
        softmax_scale, left, right, softcap, alibi_slopes, s_aux, q_descale, k_descale, v_descale, num_splits
    )
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    result, lse = run_ragged((q, k, v), lengths, block_table, options, max_seqlen_q=max_seqlen_q, plan=plan)
    if out is not None:
        check_shape("out", out, "[T, H, Dv]", result.shape)
        check_dtype("out", out, result.dtype)
        check_device("out", out, q)
        check_writable("out", out)
        result = out.copy_(result)
    if return_attn_probs:
        return result, shape_lse(lse, q), None
    return (result, shape_lse(lse, q)) if return_softmax_lse else result


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, *,
    return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:  # fmt: skip
    """Call flash_attn_varlen_func with the parts of qkv [T, 3, H, D]."""
    check_shape("qkv", qkv, "[T, 3, H, D]", [None, 3, None, None])
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attended:  # fmt: skip
    """Call flash_attn_varlen_func with q [T, H, D] and the parts of kv [Tk, 2, KH, D]."""
    check_shape("kv", kv, "[Tk, 2, KH, D]", [None, 2, None, None])
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
