"""Store to and attend over a paged KV cache: the checked entry points, and the choice of a kernel."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.attention import cpu_kernel, reference, torch_paged, triton_paged
from octavo.attention.checks import check_attention, check_scales, check_store
from octavo.attention.float8 import FLOAT8
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions
from octavo.errors import ConfigError, suggest

logger = logging.getLogger("octavo.attention")


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run attention.

    Attributes:
        unavailable_reason: why it cannot run on (device type, dtype of the cache); None: it can.
        store_kv: writes keys and values to slots.
        paged_attention_with_lse: returns (out, lse).
    """

    unavailable_reason: Callable[[str, torch.dtype], str | None]
    store_kv: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
        None,
    ]
    paged_attention_with_lse: Callable[
        [Tensor, Tensor, Tensor, AttentionMetadata, ScoreOptions], tuple[Tensor, Tensor]
    ]


def _runs_everywhere(device_type: str, dtype: torch.dtype) -> str | None:
    return None


# In order of preference; "reference" comes last and is never needed by "auto".
_IMPLEMENTATIONS = {
    "c": Implementation(
        cpu_kernel.unavailable_reason, cpu_kernel.store_kv, cpu_kernel.paged_attention_with_lse
    ),
    "triton": Implementation(
        triton_paged.unavailable_reason, triton_paged.store_kv, triton_paged.paged_attention_with_lse
    ),
    "torch": Implementation(_runs_everywhere, torch_paged.store_kv, torch_paged.paged_attention_with_lse),
    "reference": Implementation(_runs_everywhere, reference.store_kv, reference.paged_attention_with_lse),
}


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write each token's key and value to its slot of the cache, in place.

    Args:
        k: [T, KH, D] keys; a strided view of a fused qkv will do, its last dimension contiguous. In the
            dtype of the cache; float32, bfloat16 or float16 for a float8 (float8_e4m3fn) one.
        v: [T, KH, D] values, likewise.
        k_cache: [N, B, KH, D], any strides, last dimension contiguous; written.
        v_cache: [N, B, KH, D], likewise; written.
        slot_mapping: [T] int32 or int64, block id * B + offset; -1 writes nothing.
        k_scale: [KH] contiguous float32 of a float8 cache: k / k_scale is stored, and saturates; None: 1.
        v_scale: [KH], likewise of values; both or neither.
        impl: "auto" or one of available_impls().

    Raises:
        InvalidArgumentError: a shape, dtype, device or slot does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_scales(k_cache, k_scale, v_scale)
    chosen = _IMPLEMENTATIONS[choose_impl(impl, k_cache.device.type, k_cache.dtype)]
    chosen.store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend each query token to its own sequence's keys in the cache; returns [T, H, D], dtype of q.

    As paged_attention_with_lse, without the second result.
    """
    return paged_attention_with_lse(
        q,
        k_cache,
        v_cache,
        metadata,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        impl=impl,
    )[0]


def paged_attention_with_lse(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend each query token to its own sequence's keys in the cache.

    The token at position p sees the keys j <= p, j < seq_len and, with a window, j > p - window. Query
    head h reads kv head h // (H / KH). Any mix of prefill and decode, any block size and head dim.

    Args:
        q: [T, H, D] queries, any strides, last dimension contiguous. In the dtype of the cache; float32,
            bfloat16 or float16 for a float8 (float8_e4m3fn) one.
        k_cache: [N, B, KH, D] keys, any strides, last dimension contiguous.
        v_cache: [N, B, KH, D] values, likewise.
        metadata: the step; without a plan in it each call makes a flat one.
        scale: factor of q.k, usually 1 / sqrt(D).
        window: a token sees its last `window` keys, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        alibi_slopes: [H] float32; adds -slope * (p - j) to the scores.
        k_scale: [KH] contiguous float32 of a float8 cache, by which its keys are multiplied; None: 1.
        v_scale: [KH], likewise of values; both or neither.
        impl: "auto" or one of available_impls().

    Returns:
        (out [T, H, D] in the dtype of q, lse [T, H] float32: natural log of the sum of exponentials).
        Where a token sees nothing, out is 0 and lse is -inf.

    Raises:
        InvalidArgumentError: a shape, dtype, device, option or length does not fit, or on a CPU the block
            table names a block that does not exist within the length of a sequence with query tokens.
        ConfigError: impl is unknown or cannot run here.
    """
    options = ScoreOptions(scale, window, softcap, alibi_slopes, k_scale, v_scale)
    check_attention(q, k_cache, v_cache, metadata, options)
    chosen = _IMPLEMENTATIONS[choose_impl(impl, q.device.type, k_cache.dtype)]
    return chosen.paged_attention_with_lse(q, k_cache, v_cache, metadata, options)


def available_impls(device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Say what can run on a device with a dtype of the cache, and why the rest cannot.

    Returns:
        Each implementation, in the order in which "auto" prefers them: None if it can run on the device
        with the dtype, else the reason why not.
    """
    device_type = torch.device(device).type
    return {name: impl.unavailable_reason(device_type, dtype) for name, impl in _IMPLEMENTATIONS.items()}


@cache
def choose_impl(impl: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the implementation to run for a dtype of the cache.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    if impl == "auto":
        return _preferred(device_type, dtype)
    if impl not in _IMPLEMENTATIONS:
        names = ["auto", *_IMPLEMENTATIONS]
        raise ConfigError(f"impl must be one of {names}, got {impl!r}{suggest(impl, names)}")
    reason = _IMPLEMENTATIONS[impl].unavailable_reason(device_type, dtype)
    if reason is not None:
        raise ConfigError(f'attention impl "{impl}" cannot run: {reason}; use impl="auto" or "torch"')
    return impl


def _preferred(device_type: str, dtype: torch.dtype) -> str:
    """The first that can run. Only a kernel that should have run here but cannot is worth a warning."""
    fastest, slowdown = ("triton", "many") if device_type == "cuda" else ("c", "several")
    reason = _IMPLEMENTATIONS[fastest].unavailable_reason(device_type, dtype)
    if reason is None:
        return fastest
    if device_type == "cuda" or dtype in (torch.float32, FLOAT8):
        logger.warning("attention runs in PyTorch, %s times slower than compiled: %s", slowdown, reason)
    return "torch"
