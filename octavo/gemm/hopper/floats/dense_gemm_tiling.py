"""Where the GEMM for Hopper GPUs runs, and how it is tiled: by measurement on an H200."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.kernels.device import nvidia_generation

# Values of 16 bits of K side by side in shared memory; and rows of x that a warpgroup multiplies at once.
ATOM = 64
ATOM_BYTES = 128
GROUP_ROWS = 64
# An SM's shared memory, less what barriers and the system take: the more bytes in flight, the better.
_SHARED_BYTES = 200 * 1024
# Fewest programs: with more of them tiles are smaller and rows are read more often. Long sums (K) of a few
# rows take more.
_NUM_PROGRAMS = 64
_NUM_PROGRAMS_LONG = 72
_LONG = 4096
# If there are so many tiles of 32 rows of the weight, long sums take no smaller ones.
_ENOUGH = 48
# Each stage's barriers take time to set up.
_MAX_STAGES = 24
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Tile of one program.

    Attributes:
        rows: of x: 8, 16, 32 or 64.
        columns: of the result: 8, 16, 32, 64 or 128; with an activation twice as many rows of the weight.
        depth: of K per stage, a multiple of ATOM.
        weight_stages: buffers for weights, at least row_stages. They are filled before rows may be read.
        row_stages: buffers for rows, at least 2 unless depth is all of K.
    """

    rows: int
    columns: int
    depth: int
    weight_stages: int
    row_stages: int


def unsupported_reason(x: Tensor, weight: Tensor | Float8Weight) -> str | None:
    """Return why the GEMM for Hopper GPUs cannot run with x [M, K] and weight [N, K], or None if it can."""
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(x, weight)


def misfit(x: Tensor, weight: Tensor | Float8Weight) -> str | None:
    """Return why a Hopper GPU's GEMM cannot multiply x [M, K] by weight [N, K]; called per layer and step."""
    if isinstance(weight, Float8Weight):
        return float8_misfit(weight) or _float8_rows_misfit(x, weight)
    x_shape, weight_shape = x.shape, weight.shape
    if (
        len(x_shape) == len(weight_shape) == 2
        and x_shape[0] >= 1
        and weight_shape[0] >= 16
        and weight_shape[0] % 16 == 0
        and x_shape[1] == weight_shape[1] >= ATOM
        and x_shape[1] % ATOM == 0
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    ):
        return None
    return (
        "x [M, K] and weight [N, K] must be bfloat16 or float16, the weight contiguous, x with a "
        "contiguous last dimension, M >= 1, K a multiple of 64, N of 16, addresses and strides of 16 "
        f"bytes; got {list(x.shape)} {x.dtype} with strides {list(x.stride())}, "
        f"{list(weight.shape)} {weight.dtype} with strides {list(weight.stride())}"
    )


def float8_misfit(weight: Float8Weight) -> str | None:
    """Return why a Hopper GPU's GEMM cannot multiply float8 rows by a weight [N, K], or None if it can."""
    num_rows, size = weight.shape
    if num_rows % 32 == size % ATOM_BYTES == 0 and weight.width in (ATOM_BYTES, size):
        return None
    return (
        "a float8 weight [N, K] must have K a multiple of 128, N of 32, tiles 128 or K columns wide; "
        f"got {[num_rows, size]} with tiles of {weight.width}"
    )


def _float8_rows_misfit(x: Tensor, weight: Float8Weight) -> str | None:
    if x.dtype == FLOAT8 and x.is_contiguous() and x.shape[1:] == weight.shape[1:]:
        return None
    return f"x must be contiguous float8 [M, {weight.shape[1]}], got {list(x.shape)} {x.dtype}"


def hopper_tiling_for(num_rows: int, num_weight_rows: int, size: int, *, is_gated: bool) -> HopperTiling:
    """Return the tiling for the GEMM of M rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M.
        num_weight_rows: N, gate and up counted.
        size: K.
        is_gated: whether an activation halves the columns.
    """
    halves = 2 if is_gated else 1
    num_columns = num_weight_rows // halves
    rows = next((r for r in (8, 16, 32) if num_rows <= r), GROUP_ROWS)
    num_programs, least = _NUM_PROGRAMS, 8
    if size >= _LONG and rows < GROUP_ROWS:
        num_programs, least = _NUM_PROGRAMS_LONG, (32 if num_weight_rows >= 32 * _ENOUGH else 16) // halves
    columns = 64 // halves
    while columns > least and -(-num_rows // rows) * -(-num_columns // columns) < num_programs:
        columns //= 2
    return fill_tiling(rows, columns, size, is_gated=is_gated)


def fill_tiling(
    rows: int, columns: int, size: int, *, is_gated: bool, shared_bytes: int = _SHARED_BYTES
) -> HopperTiling:
    """Return a tiling with as many buffers as fit into shared memory.

    A stage of rows takes up to 16 KiB, and at least four stages fit. Weights get what rows leave, which is at
    least half. If all of a program's weights fit, rows get what weights leave.

    Args:
        rows: as in HopperTiling.
        columns: as in HopperTiling.
        size: K.
        is_gated: whether an activation halves the columns.
        shared_bytes: shared memory to fill.
    """
    # A product reads beyond the last rows, and barriers take space, too.
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
