"""Tilings of the Triton attention kernels, by head dimension and dtype: the fastest measured on an H200.

Arguments of all functions here:
    group: query heads per kv head; a tile holds at least those of one token.
    padded_dim: head dimension, rounded up to a power of two.
    dtype: of the cache for decode_shape, else of the GEMMs' operands.
"""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.kernels.device import power_of_two

ONE_BLOCK = 1 << 30
"""Block size for which kernels are compiled where each sequence lies within one block.

It exceeds every real block, so that caches of different lengths share their kernels.
"""

MOST_UNIFORM = 1024
"""Most sequences of a step whose map is made in one launch; see triton/uniform.py."""

_KEYS = 64


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile of one kernel.

    Attributes:
        rows: query rows (tokens x query heads of a kv head), a power of two, at least 16.
        keys: keys per iteration, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        programs_per_multiprocessor: programs that run concurrently on an SM.
        max_registers: maximum registers per thread, so that these programs fit; None: no limit.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    max_registers: int | None = None


# Decoding with up to 16 query rows, by head dimension and bytes per number. Many small programs run
# concurrently: with short sequences each has few tiles, and others hide the latency of its loads. A single
# sequence is split over all programs, so it uses fewer, larger ones.
_SMALL_TILES = {
    (128, 2): TileShape(16, 32, 2, 3, 4),
    (128, 1): TileShape(16, 64, 2, 3, 4),
    (64, 2): TileShape(16, 32, 2, 3, 6, 168),
}


def padded_head_dim(head_dim: int, dtype: torch.dtype | None = None) -> int:
    """Return the tile width for a head dimension: a power of two, at least 64, or 32 in float32.

    Triton 3.6 miscompiles products with tiles of 32 16-bit columns that registers write to shared memory, as
    happens where strides forbid wider copies.

    Args:
        head_dim: of keys or values.
        dtype: of the products' operands; None: any.
    """
    return max(32 if dtype == torch.float32 else 64, power_of_two(head_dim))


@cache
def decode_shape(group: int, padded_dim: int, dtype: torch.dtype, *, is_alone: bool = False) -> TileShape:
    """Return the tiling for few query tokens, bound by memory; is_alone: the batch is one sequence."""
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


def fused_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for the token of a sequence, or of a few, that is decoded: a program on each SM."""
    return TileShape(
        rows=max(16, power_of_two(group)),
        keys=_keys(padded_dim, dtype),
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=1,
    )


@cache
def prefill_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiling for many query tokens, bound by the tensor cores."""
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
    """Return the portable kernel's tiling for shared nodes: many query tokens, few keys per program."""
    if padded_dim * dtype.itemsize > 256:
        return prefill_shape(group, padded_dim, dtype)
    return TileShape(
        rows=max(64, power_of_two(group)),
        keys=_keys(padded_dim, dtype),
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=2,
    )


def deterministic_shape(group: int, padded_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the single tiling of a deterministic step, for any number of query tokens.

    16-bit dtypes use 64 rows, which Hopper's matrix instruction needs. float32 has no such instruction and
    decodes faster with few rows.
    """
    return (decode_shape if dtype == torch.float32 else node_shape)(group, padded_dim, dtype)


def _keys(padded_dim: int, dtype: torch.dtype) -> int:
    """Return the keys of a tile: at most 16 KiB, so that several tiles fit in shared memory."""
    return min(_KEYS, max(16, 16384 // (padded_dim * dtype.itemsize)))
