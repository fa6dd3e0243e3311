"""The one place that chooses how attention runs: the implementation, the GPU kernel and its tiling.

    choose_impl      "auto" -> c | triton | torch: the fastest that can run here
    decode_tile      the tiling for decoding
    prompt_tile      the tiling for prompts
    node_tiles       the tiling for shared nodes
    attend_*         launch the Hopper kernel if it supports the call, else the portable one

Each kernel says by its own `unsupported_reason` why it cannot run (None if it can), and never asks about
another kernel. Importing this file imports no Triton, so it works on machines without Triton.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.attention.float8 import FLOAT8
from octavo.attention.tilings import hopper
from octavo.attention.tilings.portable import TileShape, node_shape, padded_head_dim, thin_shape
from octavo.errors import ConfigError, suggest
from octavo.kernels.device import num_multiprocessors

if TYPE_CHECKING:
    from octavo.attention.cache import LayerCache
    from octavo.attention.metadata import AttentionMetadata
    from octavo.attention.plan.device_forest import DeviceForest
    from octavo.attention.score_options import ScoreOptions
    from octavo.attention.triton.kernel_call import Call
    from octavo.attention.triton.work import FatWork, ThinWork

logger = logging.getLogger("octavo.attention")

IMPLS = ("c", "triton", "torch", "reference")
"""Implementations in order of preference. "auto" never picks "reference"."""

# From this many sequences on, leaves that run beside nodes use smaller tiles.
_MANY_LEAVES = 128


@dataclass(frozen=True, slots=True)
class Implementation:
    """The two functions that each implementation has."""

    store_kv: Callable[[Tensor, Tensor, "LayerCache", Tensor], None]
    paged_attention_with_lse: Callable[..., tuple[Tensor, Tensor]]


@cache
def implementation(impl: str) -> Implementation:
    """Return the implementation of a name in IMPLS."""
    # Imported here to avoid a cycle: metadata imports DeviceForest, which imports this file.
    from octavo.attention import gpu_paged, reference, torch_paged
    from octavo.attention.cpu import c_calls as kernel

    module = {"c": kernel, "triton": gpu_paged, "torch": torch_paged, "reference": reference}[impl]
    return Implementation(module.store_kv, module.paged_attention_with_lse)


def unsupported_reason(
    impl: str, device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None = None
) -> str | None:
    """Return why an implementation cannot run, or None if it can; arguments as for choose_impl."""
    if impl == "c":
        from octavo.attention.cpu import c_calls as kernel

        return kernel.unsupported_reason(device_type, dtype, query_dtype)
    if impl == "triton":
        from octavo.attention import gpu_paged

        return gpu_paged.unsupported_reason(device_type, dtype)
    return None


def available_impls(device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Return, for each implementation in order of preference, why it cannot run, or None if it can.

    Args:
        device: where attention would run.
        dtype: of the cache.
    """
    device_type = torch.device(device).type
    return {impl: unsupported_reason(impl, device_type, dtype) for impl in IMPLS}


@cache
def choose_impl(
    impl: str, device_type: str, dtype: torch.dtype, query_dtype: torch.dtype | None = None
) -> str:
    """Return the name of the implementation to run.

    Args:
        impl: "auto" or one of IMPLS.
        device_type: of all tensors.
        dtype: of the cache.
        query_dtype: of queries; None: that of the cache.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    if impl == "auto":
        return _preferred(device_type, dtype, query_dtype)
    if impl not in IMPLS:
        names = ["auto", *IMPLS]
        raise ConfigError(f"impl must be one of {names}, got {impl!r}{suggest(impl, names)}")
    reason = unsupported_reason(impl, device_type, dtype, query_dtype)
    if reason is not None:
        raise ConfigError(f'attention impl "{impl}" cannot run: {reason}; use impl="auto" or "torch"')
    return impl


def choose_for_call(
    impl: str, cache: "LayerCache", query_dtype: torch.dtype, options: "ScoreOptions | None" = None
) -> str:
    """Return the name of the implementation for a call over a cache; options None: the call stores.

    "auto" takes PyTorch where the compiled kernels lack something that the call asks for.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    chosen = choose_impl(impl, cache.k.device.type, cache.k.dtype, query_dtype)
    if chosen != "c":
        return chosen
    from octavo.attention.cpu import c_calls as kernel

    reason = kernel.call_unsupported_reason(cache, options)
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


def decode_tile(
    device: torch.device,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    num_sequences: int,
    shares: bool,
) -> TileShape:
    """Return the tiling for decoding: that of the Hopper kernel if it supports the cache.

    Args:
        device: where the kernel runs.
        group: query heads per kv head.
        head_dim: D.
        dtype: of the cache.
        block_size: tokens in a block of the cache.
        num_sequences: S. A single sequence is split over all programs.
        shares: other kernels read the prefixes that the sequences share.
    """
    if (
        num_sequences > 1
        and head_dim == hopper.DECODE_DIM
        and group <= hopper.DECODE_SHAPE.rows
        and hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size) is None
    ):
        if shares:
            return hopper.LEAF_SHAPE if num_sequences >= _MANY_LEAVES else hopper.FEW_LEAVES_SHAPE
        return hopper.DECODE_SHAPE
    return thin_shape(group, padded_head_dim(head_dim), dtype, is_alone=num_sequences == 1)


def prompt_tile(
    device: torch.device,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    num_rows: int,
    portable: TileShape,
) -> TileShape:
    """Return the tiling that cuts prompts into units, if these are left whole; arguments as for decode_tile.

    Args:
        num_rows: query tokens times heads.
        portable: the tiling for the portable kernel, and for all but short prompts.
    """
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    return hopper.SHORT_SHAPE if reason is None and hopper.is_short(device, group, num_rows) else portable


def node_tiles(
    device: torch.device, group: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> tuple[TileShape, TileShape, bool]:
    """Return the tilings of shared nodes with many query tokens; arguments as for decode_tile.

    Returns:
        (tiling in steps with prompts, tiling in steps that only decode, whether nodes with few query tokens
        have a kernel of their own). On Hopper they need none: its kernel reads them at full memory bandwidth.
    """
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is None and group <= hopper.BESIDE_SHAPE.rows:
        return hopper.NODE_SHAPE, hopper.BESIDE_SHAPE, False
    tile = node_shape(group, padded_head_dim(head_dim), torch.float16 if dtype == FLOAT8 else dtype)
    return tile, tile, True


def whole_unit_programs(
    device: torch.device, head_dim: int, dtype: torch.dtype, block_size: int, tile: TileShape
) -> int:
    """Return how many programs are enough to leave units whole; with fewer, units are cut into parts.

    Only the portable kernel takes parts. Hopper's kernel takes whole units, and is so much faster that a
    quarter of the SMs is enough.
    """
    num_resident = num_multiprocessors(device) * tile.programs_per_multiprocessor
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    return num_resident if reason is not None else num_resident // 4


def attend_thin(call: "Call", metadata: "AttentionMetadata", work: "ThinWork", *, early: bool) -> None:
    """Launch the decode kernel; see triton.decode.attend_thin."""
    from octavo.attention.hopper import tma_decode as on_hopper
    from octavo.attention.triton import paged_decode as portable

    kernel = on_hopper if on_hopper.unsupported_reason(call, work) is None else portable
    kernel.attend_thin(call, metadata, work, early=early)


def attend_fat(call: "Call", work: "FatWork") -> None:
    """Launch the prefill kernel; see triton.prefill.attend_fat."""
    from octavo.attention.hopper import tma_prefill as on_hopper
    from octavo.attention.triton import paged_prefill as portable

    kernel = on_hopper if on_hopper.unsupported_reason(call, work) is None else portable
    kernel.attend_fat(call, work)


def attend_fat_nodes(call: "Call", forest: "DeviceForest", *, decodes: bool) -> None:
    """Launch the kernel for shared nodes with many query tokens; see triton.nodes.attend_fat_nodes."""
    from octavo.attention.hopper import tma_prefill as on_hopper
    from octavo.attention.triton import nodes as portable

    kernel = on_hopper if on_hopper.nodes_unsupported_reason(call, forest) is None else portable
    kernel.attend_fat_nodes(call, forest, decodes=decodes)
