"""How the Triton attention kernels are tiled: what measured best on an H200, by head dimension and dtype."""

from dataclasses import dataclass

import torch


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


def thin_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for sequences with few query tokens, where reading the cache is all that counts.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of queries and cache.
    """
    return TileShape(
        rows=max(16, _power_of_two(group)),
        keys=_keys(16384, padded_dim, dtype),
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=2,
    )


def fat_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for many query tokens, where the matrix units' rate counts.

    Args:
        group: query heads of a kv head; a tile holds at least one token's.
        padded_dim: head dimension, rounded up to a power of two.
        dtype: of queries and cache.
    """
    rows = 128 if padded_dim * dtype.itemsize <= 256 else 64
    return TileShape(
        rows=max(rows, _power_of_two(group)),
        keys=_keys(16384, padded_dim, dtype),
        num_warps=4,
        num_stages=2,
        programs_per_multiprocessor=2,
    )


def _keys(tile_bytes: int, padded_dim: int, dtype: torch.dtype) -> int:
    """Keys whose rows of the cache fill tile_bytes, within what the kernels compile well for."""
    return min(128, max(16, tile_bytes // (padded_dim * dtype.itemsize)))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
