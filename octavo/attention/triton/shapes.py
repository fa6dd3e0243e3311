"""How the Triton attention kernels are tiled: what measured best on an H200, by head dimension and dtype."""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.gpu.device import power_of_two

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


def padded_head_dim(head_dim: int) -> int:
    """Return the tile width for a head dimension: a power of two, half of it enough for the tensor cores."""
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


@cache
def fat_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for many query tokens, bound by the tensor cores.

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
