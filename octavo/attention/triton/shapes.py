"""How the Triton attention kernels are tiled: what measured best on an H200, by head dimension and dtype."""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.gpu.device import nvidia_generation, power_of_two

_KEYS = 64


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile of one kernel.

    Attributes:
        rows: query rows (tokens x query heads of a kv head), a power of two, at least 16.
        keys: keys per iteration, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        programs_per_multiprocessor: how many are meant to run side by side.
        max_registers: registers a thread may use, so that they fit side by side; None: no limit.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None


# Decoding by head dimension and bytes of a number, 16 query rows at most. Many small programs: short
# sequences leave few tiles to each, whose loads others must cover. One sequence alone is cut into as many
# pieces as there are programs, so it wants few.
_SMALL_TILES = {
    (128, 2): TileShape(16, 32, 2, 3, 4),
    (128, 1): TileShape(16, 64, 2, 3, 4),
    (64, 2): TileShape(16, 32, 2, 3, 6, 168),
}

# What hopper_decode is for.
HOPPER_DECODE_SHAPE = TileShape(16, 32, 1, 3, 4, 255)
_HOPPER_DECODE_DIM = 128

# Two warpgroups of 64 rows and one warp that fetches fill a multiprocessor; see hopper_prefill. Prompts take
# twice the keys where blocks are that long.
HOPPER_NODE_SHAPE = TileShape(128, 64, 8, 3, 1, 168)
HOPPER_PROMPT_SHAPE = TileShape(128, 128, 8, 3, 1, 168)

# While sequences decode, one warpgroup and the sequences' own parts share a multiprocessor. Of the 512
# registers a lane in each of its quarters, two warps take 272: too many for a second such program, which
# would keep the others out. Left are 240, for one warp of few sequences or two of many.
HOPPER_BESIDE_SHAPE = TileShape(64, 64, 4, 2, 1, 136)
HOPPER_FEW_LEAVES_SHAPE = TileShape(16, 32, 1, 2, 4, 240)
HOPPER_LEAF_SHAPE = TileShape(16, 16, 1, 2, 8, 120)
_MANY_LEAVES = 128


def padded_head_dim(head_dim: int) -> int:
    """Return the tile width for a head dimension: a power of two, half of it enough for the matrix units."""
    return max(32, power_of_two(head_dim))


@cache
def thin_shape(group: int, padded_dim: int, dtype: torch.dtype, *, is_alone: bool = False) -> TileShape:
    """Return the tiling for sequences with few query tokens, where reading the cache is all that counts.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of the cache.
        is_alone: there is one sequence.
    """
    rows = max(16, power_of_two(group))
    small_tile = _SMALL_TILES.get((padded_dim, dtype.itemsize))
    if rows == 16 and small_tile is not None and not is_alone:
        return small_tile
    small = _KEYS * padded_dim * dtype.itemsize <= 8192
    return TileShape(
        rows=rows,
        keys=_keys(padded_dim, dtype),
        num_warps=4,
        num_stages=3 if dtype.itemsize > 1 else 4,
        programs_per_multiprocessor=3 if small else 2,
        max_registers=168 if small else None,
    )


def decode_shape(
    device: torch.device,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    num_sequences: int,
    shares: bool,
) -> TileShape:
    """Return the tiling for decoding: that of the kernel for Hopper GPUs if it can take the cache.

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
        and head_dim == _HOPPER_DECODE_DIM
        and group <= HOPPER_DECODE_SHAPE.rows
        and fits_hopper(device, dtype, head_dim=head_dim, block_size=block_size)
    ):
        if shares:
            return HOPPER_LEAF_SHAPE if num_sequences >= _MANY_LEAVES else HOPPER_FEW_LEAVES_SHAPE
        return HOPPER_DECODE_SHAPE
    return thin_shape(group, padded_head_dim(head_dim), dtype, is_alone=num_sequences == 1)


@cache
def fat_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for many query tokens, where the matrix units' rate counts.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of the products' operands.
    """
    wide = padded_dim * dtype.itemsize > 256
    return TileShape(
        rows=max(64 if wide else 128, power_of_two(group)),
        keys=_keys(padded_dim, dtype),
        num_warps=4 if wide else 8,
        num_stages=2,
        programs_per_multiprocessor=2,
        max_registers=None if wide else 128,
    )


@cache
def fits_hopper(device: torch.device, dtype: torch.dtype, *, head_dim: int, block_size: int) -> bool:
    """Say whether the kernel for Hopper GPUs can take a cache; its strides and the options count too."""
    return (
        nvidia_generation(device) == 9
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and block_size % 64 == 0
    )


@cache
def node_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the portable kernel's tiling for shared nodes with many query tokens, few keys a program.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of queries and cache.
    """
    if padded_dim * dtype.itemsize > 256:
        return fat_shape(group, padded_dim, dtype)
    return TileShape(
        rows=max(64, power_of_two(group)),
        keys=_keys(padded_dim, dtype),
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=2,
    )


def deterministic_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the one tiling of a deterministic step, whose tiles hold one token or many.

    64 rows are what the fast matrix instruction needs. float32 has none, and decodes better with few.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of the products' operands.
    """
    return (thin_shape if dtype == torch.float32 else node_shape)(group, padded_dim, dtype)


def _keys(padded_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile, at most 16 KiB of keys and as much of values: several fit into shared memory."""
    return min(_KEYS, max(16, 16384 // (padded_dim * dtype.itemsize)))
