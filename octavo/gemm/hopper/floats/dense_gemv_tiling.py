"""Where the GEMV for Hopper GPUs runs, and how it is tiled: by measurement on an H200."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.kernels.device import nvidia_generation

# Rows of the weight that a program multiplies at once; warps that share K.
TILE_ROWS = 16
WARPS = 4
# Bytes of a row of the weight side by side in shared memory: a warp reads them without bank conflicts.
ATOM_BYTES = 64
# Numbers of x that all warps load at once.
X_STEP = WARPS * 256
# Half of an SM's shared memory, less the system's, barriers and sums: the next kernel's weights are in flight
# while this one runs.
_SHARED_BYTES = 112_000
# With so many registers two programs fit on an SM, which allots them for two warpgroups a program. Longer
# rows of x need more while they are normed or scaled.
_REGISTERS = 104
_LONG = 16384
_LONG_REGISTERS = 168
# x takes half of _SHARED_BYTES or less.
_MAX_SIZE = 26_624
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class GemvTiling:
    """What a program has in flight.

    Attributes:
        blocks: atoms of each warp per step, of TILE_ROWS rows.
        stages: steps in shared memory, at least 2.
        registers: most of a thread.
    """

    blocks: int
    stages: int
    registers: int


def unsupported_reason(weight: Tensor | Float8Weight) -> str | None:
    """Return why the GEMV cannot run with a weight [N, K] and a row in half precision, or None if it can."""
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(weight)


def misfit(weight: Tensor | Float8Weight) -> str | None:
    """Return why the GEMV cannot multiply by a weight [N, K] on a Hopper GPU, or None if it can."""
    values = weight.values if isinstance(weight, Float8Weight) else weight
    size = values.shape[1]
    if isinstance(weight, Float8Weight):
        fits = values.dtype == FLOAT8 and (weight.width >= size or weight.width % ATOM_BYTES == 0)
    else:
        fits = values.dtype in _DTYPES
    if (
        fits
        and values.is_contiguous()
        and values.data_ptr() % 16 == 0
        and values.shape[0] >= 2 * TILE_ROWS
        and 0 < size <= _MAX_SIZE
        and size * values.itemsize % ATOM_BYTES == 0
    ):
        return None
    return (
        f"it needs contiguous weights [N, K] in float16, bfloat16 or float8 at addresses that are a multiple "
        f"of 16 bytes, N >= {2 * TILE_ROWS}, K <= {_MAX_SIZE}, rows and tiles of scales a multiple of "
        f"{ATOM_BYTES} bytes wide; "
        f"got {list(values.shape)} {values.dtype}, strides {list(values.stride())}"
    )


@cache
def gemv_tiling_for(size: int, itemsize: int) -> GemvTiling:
    """Return the tiling for rows of K numbers.

    Args:
        size: K.
        itemsize: bytes of a number of the weight.
    """
    # Bytes of a row in a step, and x padded to whole ones.
    step = 8 * WARPS * ATOM_BYTES
    columns = max(X_STEP, step // itemsize)
    room = _SHARED_BYTES - 2 * -(-size // columns) * columns
    blocks = 8 if size * itemsize >= step and room >= 3 * step * TILE_ROWS else 4
    stages = room // (blocks * WARPS * ATOM_BYTES * TILE_ROWS)
    return GemvTiling(blocks, stages, _REGISTERS if size <= _LONG else _LONG_REGISTERS)
