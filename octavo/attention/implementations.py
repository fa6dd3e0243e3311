"""Which implementation of attention runs: in C, in Triton, in PyTorch, or the reference.

Each says by its own `unsupported_reason` why it cannot run (None if it can), and never asks about another.
Importing this file imports no Triton, so it works on machines without it.
"""

import logging
from functools import cache
from types import MappingProxyType, ModuleType

import torch

from octavo.attention import gpu_paged, reference, torch_paged
from octavo.attention.cache import FLOAT8, LayerCache
from octavo.attention.cpu import c_calls
from octavo.attention.score_options import ScoreOptions
from octavo.errors import ConfigError, suggest

logger = logging.getLogger("octavo.attention")

implementations = MappingProxyType[str, ModuleType](
    {"c": c_calls, "triton": gpu_paged, "torch": torch_paged, "reference": reference}
)
"""Modules with store_kv and paged_attention_with_lse, fastest first; "auto" never picks the reference."""


def unsupported_reason(
    impl: str, device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None = None
) -> str | None:
    """Return why an implementation cannot run, or None if it can; arguments as for choose_impl."""
    if impl == "c":
        return c_calls.unsupported_reason(device_type, dtype, query_dtype)
    if impl == "triton":
        return gpu_paged.unsupported_reason(device_type, dtype)
    return None


def available_impls(device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Return, for each implementation in order of preference, why it cannot run, or None if it can.

    Args:
        device: where attention would run.
        dtype: of the cache.
    """
    device_type = torch.device(device).type
    return {impl: unsupported_reason(impl, device_type, dtype) for impl in implementations}


@cache
def choose_impl(
    impl: str, device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None = None
) -> str:
    """Return the name of the implementation to run.

    Args:
        impl: "auto" or a key of implementations.
        device_type: of all tensors.
        dtype: of the cache.
        query_dtype: of queries; None: that of the cache.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    if impl == "auto":
        return _preferred(device_type, dtype, query_dtype)
    if impl not in implementations:
        names = ["auto", *implementations]
        raise ConfigError(f"impl must be one of {names}, got {impl!r}{suggest(impl, names)}")
    reason = unsupported_reason(impl, device_type, dtype, query_dtype)
    if reason is not None:
        raise ConfigError(f'attention impl "{impl}" cannot run: {reason}; use impl="auto" or "torch"')
    return impl


def choose_for_call(
    impl: str, cache: LayerCache, query_dtype: torch.dtype, options: ScoreOptions | None = None
) -> str:
    """Return the name of the implementation for a call over a cache; options None: the call stores.

    "auto" takes PyTorch where the compiled kernels lack something that the call asks for.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    chosen = choose_impl(impl, cache.k.device.type, cache.k.dtype, query_dtype)
    if chosen != "c":
        return chosen
    reason = c_calls.call_unsupported_reason(cache, options)
    if reason is None:
        return chosen
    if impl == "auto":
        return "torch"
    raise ConfigError(f'attention impl "c" cannot run: {reason}; use impl="auto" or "torch"')


def _preferred(device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None) -> str:
    """Return the fastest implementation that can run; warn if a kernel was expected here but cannot run."""
    fastest, slowdown = ("triton", "many") if device_type == "cuda" else ("c", "several")
    reason = unsupported_reason(fastest, device_type, dtype, query_dtype)
    if reason is None:
        return fastest
    if device_type == "cuda" or torch.float32 in (dtype, query_dtype) or dtype == FLOAT8:
        logger.warning("attention runs in PyTorch, %s times slower than compiled: %s", slowdown, reason)
    return "torch"
