"""Merge partial results, and FlashAttention-3's scheduling call."""

import torch
from torch import Tensor

from octavo.attention import merge
from octavo.attention.checks import check_forward_only, check_writable
from octavo.errors import InvalidArgumentError
from octavo.ops.arguments import Window
from octavo.ops.checks.refusals import (
    check_device,
    check_dtype,
    check_floats,
    check_tensor,
)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys; see octavo.attention.merge.

    Args:
        out_partial: [P, B, Sq, H, Dv] or [P, T, H, Dv] partial outputs.
        lse_partial: [P, B, Sq, H] or [P, T, H] natural logarithms of their sums of exponentials.
        out: written and returned in place of a new tensor.
        out_dtype: of the result; None: that of out, else of out_partial.

    Returns:
        (out [B, Sq, H, Dv] or [T, H, Dv], lse [B, Sq, H] or [T, H] float32).

    Raises:
        InvalidArgumentError: the shapes or dtypes do not fit.
    """
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    check_forward_only(out_partial, lse_partial, out)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise InvalidArgumentError(f"out_dtype must be a torch.dtype of floats; got {out_dtype!r}")
    if not (out_partial.is_floating_point() and lse_partial.is_floating_point()):
        raise InvalidArgumentError(
            f"out_partial and lse_partial must hold floats; got {out_partial.dtype} and {lse_partial.dtype}"
        )
    if out_partial.dim() not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise InvalidArgumentError(
            f"out_partial must be [P, B, Sq, H, Dv] or [P, T, H, Dv] and lse_partial the same without Dv; "
            f"got {list(out_partial.shape)} and {list(lse_partial.shape)}"
        )
    check_device("lse_partial", lse_partial, out_partial)
    shape = out_partial.shape[1:]
    partials = out_partial if out_partial.dim() == 4 else out_partial.flatten(1, 2)
    lses = lse_partial if lse_partial.dim() == 3 else lse_partial.flatten(1, 2)
    merged, lse = merge(partials, lses)
    merged, lse = merged.view(shape), lse.view(shape[:-1])
    if out is None:
        return merged.to(out_dtype or merged.dtype), lse
    check_floats("out", out, out_partial, "out_partial's without P", shape)
    check_writable("out", out)
    if out_dtype is not None:
        check_dtype("out", out, out_dtype)
    return out.copy_(merged), lse


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
    causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Return an empty [0] int32 tensor: the kernels plan their own work on the device.

    It takes FlashAttention-3's arguments, so that code written for it runs unchanged; none is needed.
    """
    check_tensor("cache_seqlens", cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
