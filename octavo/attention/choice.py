"""The one place where attention chooses: an implementation, a GPU generation's kernel, a tiling.

    choose_impl      "auto" -> c | triton | torch            by what can run here
    decode_tile      how decoding is tiled, and by which generation's kernel
    node_tiles       the same for shared nodes
    attend_*         the launch: Hopper's kernel where it can take the call, else the portable one

Kernels never ask for one another. Whether one can run is its own `unsupported_reason`: a sentence, or None.
Importing this imports no Triton: laptops have none.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.attention.float8 import FLOAT8
from octavo.attention.hopper import shapes as hopper
from octavo.attention.triton.shapes import TileShape, node_shape, padded_head_dim, thin_shape
from octavo.errors import ConfigError, suggest

if TYPE_CHECKING:
    from octavo.attention.cache import LayerCache
    from octavo.attention.metadata import AttentionMetadata
    from octavo.attention.options import ScoreOptions
    from octavo.attention.plan.device_forest import DeviceForest
    from octavo.attention.triton.arguments import Call
    from octavo.attention.triton.step_map import FatWork, ThinWork

logger = logging.getLogger("octavo.attention")

IMPLS = ("c", "triton", "torch", "reference")
"""By name, in order of preference; "reference" is never needed by "auto"."""

# Sequences from which on leaves beside nodes take smaller tiles.
_MANY_LEAVES = 128


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run attention.

    Attributes:
        store_kv: writes keys and values to slots: (k, v, cache, slot_mapping).
        paged_attention_with_lse: returns (out, lse) of (q, cache, metadata, options).
    """

    store_kv: Callable[[Tensor, Tensor, "LayerCache", Tensor], None]
    paged_attention_with_lse: Callable[
        [Tensor, "LayerCache", "AttentionMetadata", "ScoreOptions"], tuple[Tensor, Tensor]
    ]


@cache
def implementation(impl: str) -> Implementation:
    """Return one of IMPLS."""
    # Imported here: all of them import the metadata, whose forest asks this file for its tiles.
    from octavo.attention import gpu_paged, reference, torch_paged
    from octavo.attention.cpu import kernel

    module = {"c": kernel, "triton": gpu_paged, "torch": torch_paged, "reference": reference}[impl]
    return Implementation(module.store_kv, module.paged_attention_with_lse)


def unsupported_reason(impl: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Say why one of IMPLS cannot run on a type of device with a dtype of the cache; None: it can."""
    if impl == "c":
        from octavo.attention.cpu import kernel

        return kernel.unsupported_reason(device_type, dtype)
    if impl == "triton":
        from octavo.attention import gpu_paged

        return gpu_paged.unsupported_reason(device_type, dtype)
    return None


def available_impls(device: torch.device | str, dtype: torch.dtype) -> dict[str, str | None]:
    """Say what can run on a device with a dtype of the cache, and why the rest cannot.

    Returns:
        Each implementation, in the order in which "auto" prefers them: None if it can run on the device
        with the dtype, else the reason why not.
    """
    device_type = torch.device(device).type
    return {impl: unsupported_reason(impl, device_type, dtype) for impl in IMPLS}


@cache
def choose_impl(impl: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the implementation to run for a dtype of the cache.

    Raises:
        ConfigError: impl is unknown, or was asked for by name and cannot run.
    """
    if impl == "auto":
        return _preferred(device_type, dtype)
    if impl not in IMPLS:
        names = ["auto", *IMPLS]
        raise ConfigError(f"impl must be one of {names}, got {impl!r}{suggest(impl, names)}")
    reason = unsupported_reason(impl, device_type, dtype)
    if reason is not None:
        raise ConfigError(f'attention impl "{impl}" cannot run: {reason}; use impl="auto" or "torch"')
    return impl


def _preferred(device_type: str, dtype: torch.dtype) -> str:
    """The first that can run. Only a kernel that should have run here but cannot is worth a warning."""
    fastest, slowdown = ("triton", "many") if device_type == "cuda" else ("c", "several")
    reason = unsupported_reason(fastest, device_type, dtype)
    if reason is None:
        return fastest
    if device_type == "cuda" or dtype in (torch.float32, FLOAT8):
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
    """Return the tiling for decoding: Hopper's where its kernel can take the cache.

    Args:
        device: where the kernel runs.
        group: query heads of a kv head.
        head_dim: D.
        dtype: of the cache.
        block_size: tokens in a block of the cache.
        num_sequences: S. One sequence alone is cut into as many pieces as there are programs.
        shares: what the sequences have in common is read by other kernels.
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


def node_tiles(
    device: torch.device, group: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> tuple[TileShape, TileShape, bool]:
    """Return the tilings of shared nodes with many query tokens; arguments as of decode_tile.

    Returns:
        (tiling in steps with prompts, tiling in steps that only decode, whether nodes with few query tokens
        have a kernel of their own: on Hopper one with many rows reads as fast as the memory).
    """
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is None and group <= hopper.BESIDE_SHAPE.rows:
        return hopper.NODE_SHAPE, hopper.BESIDE_SHAPE, False
    tile = node_shape(group, padded_head_dim(head_dim), torch.float16 if dtype == FLOAT8 else dtype)
    return tile, tile, True


def attend_thin(call: "Call", metadata: "AttentionMetadata", work: "ThinWork", *, early: bool) -> None:
    """Attend thin units, that is decode; see triton.decode.attend_thin."""
    from octavo.attention.hopper import decode as on_hopper
    from octavo.attention.triton import decode as portable

    kernel = on_hopper if on_hopper.unsupported_reason(call, work) is None else portable
    kernel.attend_thin(call, metadata, work, early=early)


def attend_fat(call: "Call", work: "FatWork") -> None:
    """Attend fat units, that is prefill; see triton.prefill.attend_fat."""
    from octavo.attention.hopper import prefill as on_hopper
    from octavo.attention.triton import prefill as portable

    kernel = on_hopper if on_hopper.unsupported_reason(call, work) is None else portable
    kernel.attend_fat(call, work)


def attend_fat_nodes(call: "Call", forest: "DeviceForest", *, decodes: bool) -> None:
    """Attend shared nodes with many query tokens; see triton.nodes.attend_fat_nodes."""
    from octavo.attention.hopper import prefill as on_hopper
    from octavo.attention.triton import nodes as portable

    kernel = on_hopper if on_hopper.nodes_unsupported_reason(call, forest) is None else portable
    kernel.attend_fat_nodes(call, forest, decodes=decodes)
