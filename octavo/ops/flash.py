"""flash-attention's inference functions of dense tensors, argument for argument, on GPUs and CPUs.

Signatures follow flash-attention 2.8; what FlashAttention-3 and vLLM add comes after them by keyword. Every
function normalises its arguments to one form (octavo.ops.call). None computes gradients. The overloads say
what a function returns: with a flag that only the caller knows, Any.
"""

from typing import Any, Literal, overload

from torch import Tensor

from octavo.attention.checks import check_forward_only
from octavo.ops.arguments import Window, read_window
from octavo.ops.call import Attended, Lengths, News, Options, Places
from octavo.ops.checks.refusals import check_shape, refuse_missing
from octavo.ops.run_call import run_cached, shape_lse


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: Literal[False] = False, *, qv: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, attention_chunk: int = 0,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Literal[True],
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None,
) -> Any: ...  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Tensor | None = None,
) -> Attended:  # fmt: skip
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
    refuse_missing(dropout_p, qv, attention_chunk)
    check_forward_only(q, k, v, alibi_slopes, s_aux, q_descale, k_descale, v_descale)
    left, right = read_window(window_size, causal=causal)
    options = Options(
        softmax_scale, left, right, softcap, alibi_slopes, s_aux, q_descale, k_descale, v_descale, num_splits
    )
    out, lse = run_cached((q, k, v), News(), Places(), Lengths(), options, names=("k", "v"))
    return (out, shape_lse(lse, q), None) if return_attn_probs else out


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attended:  # fmt: skip
    """Call flash_attn_func with the parts of qkv [B, S, 3, H, D]."""
    check_shape("qkv", qkv, "[B, S, 3, H, D]", [None, None, 3, None, None])
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any: ...  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Attended:  # fmt: skip
    """Call flash_attn_func with q [B, Sq, H, D] and the parts of kv [B, Sk, 2, KH, D]."""
    check_shape("kv", kv, "[B, Sk, 2, KH, D]", [None, None, 2, None, None])
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
