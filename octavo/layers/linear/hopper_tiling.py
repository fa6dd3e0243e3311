"""Which products get the kernel for Hopper GPUs, and how they are tiled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.gpu.device import nvidia_generation

# By measurement on an H200: rows from which on the kernel beats cuBLAS, and up to which, for weights of few
# columns, of many, and where sums are long; and columns from which on cuBLAS has enough to do.
MIN_ROWS = 5
MAX_ROWS = 256
_MAX_ROWS_WIDE = 128
_MAX_ROWS_LONG = 64
_WIDE = 2048
_LONG = 4096
_VOCABULARY = 65536
# Values of K side by side in shared memory, 128 bytes; and rows of x that a warpgroup multiplies at once.
ATOM = 64
GROUP_ROWS = 64
# All of a multiprocessor's but what barriers and the system take: bytes under way are what counts.
_SHARED_BYTES = 200 * 1024
# Programs at least; small tiles read rows too often. Long sums of few rows want all multiprocessors.
_NUM_PROGRAMS = 64
_NUM_PROGRAMS_LONG = 120
# Each takes time to set up.
_MAX_STAGES = 24


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Tile of one program.

    Attributes:
        rows: of x: 8, 16, 32 or 64.
        columns: of the result: 8, 16, 32, 64 or 128; with an activation twice as many rows of the weight.
        depth: of K per stage, a multiple of ATOM.
        weight_stages: buffers for weights, at least row_stages. They fill before the rows may be read.
        row_stages: buffers for rows, at least 2 unless depth is all of K.
    """

    rows: int
    columns: int
    depth: int
    weight_stages: int
    row_stages: int


def can_use(x: Tensor, weight: Tensor) -> bool:
    """Say whether x W^T, x [M, K] or rows of the same shape, is a product that hopper_linear is meant for."""
    num_columns, size = weight.shape
    most_rows = MAX_ROWS if num_columns <= _WIDE else _MAX_ROWS_WIDE
    return (
        MIN_ROWS <= x.shape[0] <= (most_rows if size < _LONG else _MAX_ROWS_LONG)
        and num_columns < _VOCABULARY
        and nvidia_generation(weight.device) == 9
        and takes(x, weight)
    )


def takes(x: Tensor, weight: Tensor) -> bool:
    """Say whether hopper_linear's kernel can read its operands, wherever they are."""
    if x.ndim != 2 or weight.ndim != 2:
        return False
    (num_rows, size), (num_columns, weight_size) = x.shape, weight.shape
    return (
        num_rows >= 1
        and num_columns >= 1
        and size == weight_size
        and size >= ATOM
        and size % ATOM == 0
        and num_columns % 16 == 0
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def choose_hopper_tiling(num_rows: int, num_weight_rows: int, size: int, *, is_gated: bool) -> HopperTiling:
    """Return the tiling for a product of M rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M.
        num_weight_rows: N, gate and up counted.
        size: K.
        is_gated: whether an activation halves the columns.
    """
    halves = 2 if is_gated else 1
    num_columns = num_weight_rows // halves
    rows = next((r for r in (8, 16, 32) if num_rows <= r), GROUP_ROWS)
    num_programs = _NUM_PROGRAMS_LONG if size >= _LONG and rows < GROUP_ROWS else _NUM_PROGRAMS
    columns = 64 // halves
    while columns > 8 and -(-num_rows // rows) * -(-num_columns // columns) < num_programs:
        columns //= 2
    return fill_tiling(rows, columns, size, is_gated=is_gated)


def fill_tiling(
    rows: int, columns: int, size: int, *, is_gated: bool, shared_bytes: int = _SHARED_BYTES
) -> HopperTiling:
    """Return a tiling with as many buffers as fit into shared memory.

    A stage of rows takes up to 16 KiB, and four or more stages fit. Weights get what rows leave them, which
    is at least half. If all of a program's weights fit, rows get what weights leave.

    Args:
        rows: as in HopperTiling.
        columns: as in HopperTiling.
        size: K.
        is_gated: whether an activation halves the columns.
        shared_bytes: to fill.
    """
    # What a product reads beyond the last rows, and barriers.
    space = shared_bytes - 2 * ATOM * (GROUP_ROWS - rows) - 1024
    weight_rows = columns * (2 if is_gated else 1)
    depth = 128 if rows > 16 else 256
    while depth > ATOM and space < 8 * depth * (rows + weight_rows):
        depth //= 2
    num_tiles = -(-size // depth)
    row_bytes, weight_bytes = 2 * rows * depth, 2 * weight_rows * depth
    row_stages = min(num_tiles, _MAX_STAGES, space // 2 // row_bytes)
    weight_stages = min(num_tiles, _MAX_STAGES, (space - row_stages * row_bytes) // weight_bytes)
    if weight_stages < row_stages:
        row_stages = weight_stages = max(2, space // (row_bytes + weight_bytes))
    elif weight_stages == num_tiles:
        row_stages = min(num_tiles, (space - weight_stages * weight_bytes) // row_bytes)
    return HopperTiling(rows, columns, depth, weight_stages, row_stages)
