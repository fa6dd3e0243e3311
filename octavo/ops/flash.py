"""flash-attention's inference functions, argument for argument, on GPUs and CPUs, without a build.

Signatures follow flash-attention 2.8; what FlashAttention-3 and vLLM add comes after them by keyword. Every
function normalises its arguments to one form (octavo.ops.call). None computes gradients.
"""

from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.ops.arguments import Window, check_maximum, read_window
from octavo.ops.checks import check_device, check_dtype, check_forward_only, check_shape, refuse
from octavo.ops.given import Lengths, News, Options, Places, Plan
from octavo.ops.run import run_cached, run_ragged, shape_lse

Attended = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> Attended:
    """Attend q [B, Sq, H, D] to k [B, Sk, KH, D] and v [B, Sk, KH, Dv]; H is a multiple of KH.

    For the options see flash_attn_with_kvcache.

    Args:
        dropout_p: must be 0.
        deterministic: accepted; results never depend on chance.
        return_attn_probs: also return lse [B, H, Sq], and None for the probabilities.

    Returns:
        out [B, Sq, H, Dv] in the dtype of q (bfloat16 for float8), or (out, lse, None).

    Raises:
        InvalidArgumentError: an argument does not fit the others, or is not supported.
    """
    _refuse(dropout_p, qv, attention_chunk)
    check_forward_only(q, k, v)
    options = Options(
        *(softmax_scale, *read_window(window_size, causal=causal), softcap, alibi_slopes, s_aux),
        *(q_descale, k_descale, v_descale, num_splits),
    )
    out, lse = run_cached((q, k, v), News(), Places(), Lengths(), options, names=("k", "v"))
    return (out, shape_lse(lse, q), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """flash_attn_func of qkv [B, S, 3, H, D]."""
    check_shape("qkv", qkv, "[B, S, 3, H, D]", [None, None, 3, None, None])
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """flash_attn_func of q [B, Sq, H, D] and kv [B, Sk, 2, KH, D]."""
    check_shape("kv", kv, "[B, Sk, 2, KH, D]", [None, None, 2, None, None])
    k, v = kv.unbind(2)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_v: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    fa_version: int | None = None,
    plan: Plan = None,
) -> Attended:
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
        seqused_q: [B] int32, the first queries of each sequence that count; the others get 0 and -inf.
        seqused_k: [B] int32, the first keys of each sequence that count.
        out: [T, H, Dv], written and returned in place of a new tensor.
        return_attn_probs: return (out, lse [H, T], None).
        return_softmax_lse: return (out, lse [H, T]).
        deterministic, pack_gqa, sm_margin, scheduler_metadata, fa_version: accepted; they change no result.
        plan: which blocks the sequences share, to read them once; never needed.

    Raises:
        InvalidArgumentError: an argument does not fit the others, or is not supported.
    """
    _refuse(dropout_p, qv, attention_chunk, q_v=q_v)
    check_forward_only(q, k, v)
    check_maximum("max_seqlen_k", max_seqlen_k)
    options = Options(
        *(softmax_scale, *read_window(window_size, causal=causal), softcap, alibi_slopes, s_aux),
        *(q_descale, k_descale, v_descale, num_splits),
    )
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    result, lse = run_ragged((q, k, v), lengths, block_table, options, max_seqlen_q=max_seqlen_q, plan=plan)
    if out is not None:
        check_shape("out", out, "[T, H, Dv]", result.shape)
        check_dtype("out", out, result.dtype)
        check_device("out", out, q)
        result = out.copy_(result)
    if return_attn_probs:
        return result, shape_lse(lse, q), None
    return (result, shape_lse(lse, q)) if return_softmax_lse else result


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """flash_attn_varlen_func of qkv [T, 3, H, D]."""
    check_shape("qkv", qkv, "[T, 3, H, D]", [None, 3, None, None])
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale),
        *(causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """flash_attn_varlen_func of q [T, H, D] and kv [Tk, 2, KH, D]."""
    check_shape("kv", kv, "[Tk, 2, KH, D]", [None, 2, None, None])
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p),
        *(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def _refuse(dropout_p: float, qv: Tensor | None, attention_chunk: int, q_v: Tensor | None = None) -> None:
    """Refuse by name what Octavo does not have."""
    if dropout_p != 0:
        raise InvalidArgumentError(f"dropout_p must be 0, octavo.ops is for inference; got {dropout_p}")
    refuse(qv=qv, q_v=q_v, attention_chunk=attention_chunk)
