"""Tilings of the Triton attention kernels, by head dimension and dtype: the fastest measured on an H200.

Arguments of all functions here:
    group: query heads per kv head; a tile holds at least those of one token.
    padded_dim: head dimension, rounded up to a power of two.
    dtype: of the cache for decode_shape, else of the GEMMs' operands.
    device: where the kernel runs; a tile is made smaller until its buffers fit the device's shared memory.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from octavo.kernels.device import power_of_two, shared_bytes

ONE_BLOCK = 1 << 30
"""Block size for which kernels are compiled where each sequence lies within one block.

It exceeds every real block, so that caches of different lengths share their kernels.
"""

MOST_UNIFORM = 1024
"""Most sequences of a step whose map is made in one launch; see triton/uniform.py."""

_KEYS = 64
# From here on, four warps have too few registers for 64 rows of results, or for what a lone token needs.
_WIDE_DIM = 512
# Numbers of results that four warps keep beside the queries.
_WARPGROUP_RESULTS = 8192
_CPU = torch.device("cpu")


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
def decode_shape(
    group: int,
    padded_dim: int,
    dtype: torch.dtype,
    *,
    is_alone: bool = False,
    device: torch.device = _CPU,
) -> TileShape:
    """Return the tiling for few query tokens, bound by memory; is_alone: the batch is one sequence."""
    rows = max(16, power_of_two(group))
    small_tile = _SMALL_TILES.get((padded_dim, dtype.itemsize))
    if rows == 16 and small_tile is not None and not is_alone:
        return small_tile
    small = _KEYS * padded_dim * dtype.itemsize <= 8192
    tile = TileShape(
        rows=rows,
        keys=_keys(padded_dim, dtype),
        num_warps=4 if rows * padded_dim <= _WARPGROUP_RESULTS else 8,
        num_stages=3 if dtype.itemsize > 1 else 4,
        programs_per_multiprocessor=3 if small else 2,
        max_registers=168 if small else None,
    )
    return _fitted(tile, rows, padded_dim, dtype, device)


def fused_shape(group: int, padded_dim: int, dtype: torch.dtype, device: torch.device = _CPU) -> TileShape:
    """Return the tiling for the token of a sequence, or of a few, that is decoded: a program on each SM."""
    rows = max(16, power_of_two(group))
    tile = TileShape(
        rows=rows,
        keys=_keys(padded_dim, dtype),
        num_warps=4 if padded_dim < _WIDE_DIM else 8,
        num_stages=3,
        programs_per_multiprocessor=1,
    )
    return _fitted(tile, rows, padded_dim, dtype, device)


@cache
def prefill_shape(group: int, padded_dim: int, dtype: torch.dtype, device: torch.device = _CPU) -> TileShape:
    """Return the tiling for many query tokens, bound by the tensor cores."""
    row_bytes = padded_dim * dtype.itemsize
    if row_bytes <= 256:
        return TileShape(max(128, power_of_two(group)), _keys(padded_dim, dtype), 8, 2, 2, 128)
    least_rows = max(32, power_of_two(group))
    if padded_dim < _WIDE_DIM or dtype.itemsize > 2:
        tile = TileShape(max(64, least_rows), _keys(padded_dim, dtype), 4, 2, 2)
    else:
        # Two warpgroups, each with half of the dimensions of 64 rows.
        tile = TileShape(max(64, least_rows), 32, 8, 2, 1)
    return _fitted(tile, least_rows, padded_dim, dtype, device)


@cache
def node_shape(group: int, padded_dim: int, dtype: torch.dtype, device: torch.device = _CPU) -> TileShape:
    """Return the portable kernel's tiling for shared nodes: many query tokens, few keys per program."""
    if padded_dim * dtype.itemsize > 256:
        return prefill_shape(group, padded_dim, dtype, device)
    return TileShape(
        rows=max(64, power_of_two(group)),
        keys=_keys(padded_dim, dtype),
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=2,
    )


def deterministic_shape(
    group: int, padded_dim: int, dtype: torch.dtype, device: torch.device = _CPU
) -> TileShape:
    """Return the single tiling of a deterministic step, for any number of query tokens.

    16-bit dtypes use 64 rows, which Hopper's matrix instruction needs. float32 has no such instruction and
    decodes faster with few rows.
    """
    if dtype == torch.float32:
        return decode_shape(group, padded_dim, dtype, device=device)
    return node_shape(group, padded_dim, dtype, device)


def _fitted(
    tile: TileShape, least_rows: int, padded_dim: int, dtype: torch.dtype, device: torch.device
) -> TileShape:
    """Take stages, then rows, then keys from a tile until its programs fit the device's shared memory."""
    most = shared_bytes(device)
    while _tile_bytes(tile, padded_dim, dtype) > most:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.rows > least_rows:
            # Half as many rows have half as many numbers to keep in registers.
            tile = replace(tile, rows=tile.rows // 2, num_warps=max(4, tile.num_warps // 2))
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        else:
            return tile
    # Each program takes 1 KiB besides, and a multiprocessor has 1 KiB more than one program can have.
    programs = (most + 1024) // (_tile_bytes(tile, padded_dim, dtype) + 1024)
    # Eight warps of 255 registers fill its registers.
    registers = programs if tile.max_registers is not None else 8 // tile.num_warps
    programs = min(programs, registers, tile.programs_per_multiprocessor)
    return replace(tile, programs_per_multiprocessor=programs)


def _tile_bytes(tile: TileShape, padded_dim: int, dtype: torch.dtype) -> int:
    """Return what a program has in shared memory: all stages but one, beside queries and weights."""
    buffers = 2 * (tile.num_stages - 1) * tile.keys * padded_dim * dtype.itemsize
    return buffers + tile.rows * max(2, dtype.itemsize) * (padded_dim + tile.keys)


def _keys(padded_dim: int, dtype: torch.dtype) -> int:
    """Return the keys of a tile: at most 16 KiB, so that several tiles fit in shared memory."""
    return min(_KEYS, max(16, 16384 // (padded_dim * dtype.itemsize)))
