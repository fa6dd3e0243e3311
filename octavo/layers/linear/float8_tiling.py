"""Where the GPU's GEMMs of float8 weights run, and how they are tiled."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from octavo.gpu.device import triton_unsupported_reason
from octavo.layers.linear.float8_weight import Float8Weight

_DTYPES = (torch.bfloat16, torch.float16)


Path = Literal["skinny", "narrow", "float8", "torch"]

# Most rows of a path.
_SKINNY_MAX_ROWS = 4
NARROW_MAX_ROWS = 64
_FLOAT8_MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class Float8Tiling:
    """Tile of one program; powers of two.

    Attributes:
        rows: of x, at least 16.
        columns: rows of the weight a program multiplies, at least 16; at most half are columns of the result
            where gate and up alternate.
        depth: of K per iteration, at least 32; not more than a scale is for.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why these GEMMs cannot run with x of a dtype on a device, or None if they can."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU with Triton, got {device}"
    reason = triton_unsupported_reason("cuda")
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"it needs a GPU with float8 (compute capability 8.9 or later), got {device}"
    if dtype not in _DTYPES:
        return f"it needs bfloat16 or float16, got {dtype}"
    return None


def has_tiles(weight: Float8Weight) -> bool:
    """Return whether the kernels can multiply a weight's tiles: rows, or a power of two, 32 or more, wide."""
    is_power = weight.width & (weight.width - 1) == 0
    return weight.width == weight.shape[1] or (is_power and weight.width >= 32)


def choose_path(num_rows: int, weight: Float8Weight) -> Path:
    """Return how rows are multiplied; see float8_gpu. Called per layer and step.

    Args:
        num_rows: M.
        weight: of a Float8GpuLinear.
    """
    if 1 <= num_rows <= _SKINNY_MAX_ROWS:
        return "skinny"
    if num_rows <= NARROW_MAX_ROWS:
        return "narrow"
    return "torch" if num_rows > _FLOAT8_MAX_ROWS and has_torch(weight) else "float8"


def has_torch(weight: Float8Weight) -> bool:
    """Return whether torch's own kernels multiply a weight: a scale for each row, sizes of 16."""
    num_rows, size = weight.shape
    return weight.height == 1 and weight.width == size and num_rows % 16 == size % 16 == 0


@cache
def choose_tiling(num_rows: int, num_weight_rows: int, size: int, *, is_float8: bool) -> Float8Tiling:
    """Return the tiling for a product of M rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M.
        num_weight_rows: N, gate and up counted.
        size: K.
        is_float8: rows are float8 as well.
    """
    rows = next((r for r in (16, 32, 64) if num_rows <= r), 128)
    columns, num_warps = (128, 8) if rows == 128 else (64, 4)
    while columns > 16 and -(-num_weight_rows // columns) * -(-num_rows // rows) < 120:
        columns //= 2
    depth = min(128 if rows >= 64 else 256, max(32, 1 << (size - 1).bit_length()))
    return Float8Tiling(rows, columns, depth, num_warps, 3 if rows == 128 else 4)
