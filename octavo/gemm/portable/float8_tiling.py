"""Where the GPU's GEMMs of float8 weights run, and how they are tiled."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch.torch_version import TorchVersion

from octavo.forms.float8 import Float8Weight
from octavo.gemm.hopper.float8 import many_tiling
from octavo.gemm.hopper.floats import dense_gemm_tiling as hopper_tiling
from octavo.gemm.hopper.floats import dense_gemv_tiling as gemv_tiling
from octavo.kernels.device import nvidia_generation, triton_unsupported_reason

_BLOCK = 128
_DTYPES = (torch.bfloat16, torch.float16)


Float8Path = Literal["gemv", "skinny", "hopper", "float8", "many", "torch"]

# Most rows of a path.
SKINNY_MAX_ROWS = 1
_FEW_MAX_ROWS = 64
# Rows that the Hopper GEMM multiplies: by weights of some rows, or of many long ones, and of many short ones.
_HOPPER_ROWS = range(2, 65)
_HOPPER_ROWS_WIDE = range(33, 65)
_NARROW = 4096
_WIDE = 16384
_DEEP = 4096
# Most rows that the GEMM of many rows multiplies by weights of few rows, if scales are of tiles.
_MANY_MAX_ROWS_TILED = 256
# Weights of many columns.
_LONG = 8192


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


def choose_path(num_rows: int, weight: Float8Weight) -> Float8Path:
    """Return how rows are multiplied; see on_gpu. Called per layer and step.

    Args:
        num_rows: M.
        weight: of a Float8GpuLinear.
    """
    if num_rows == 0:
        return "float8"
    if num_rows <= SKINNY_MAX_ROWS:
        return "gemv" if has_gemv(weight) else "skinny"
    if num_rows > _FEW_MAX_ROWS and has_many(weight) and _is_many(num_rows, weight):
        return "many"
    if num_rows in _hopper_rows(weight) and has_hopper(weight):
        return "hopper"
    if num_rows <= _FEW_MAX_ROWS:
        return "float8"
    return "torch" if has_torch(weight) else "float8"


def _hopper_rows(weight: Float8Weight) -> range:
    num_weight_rows, size = weight.shape
    has_long_tiles = weight.width == size
    if num_weight_rows < _WIDE or (has_long_tiles and size >= _DEEP):
        return _HOPPER_ROWS
    # Scales of tiles take it longer than float8_linear.
    return _HOPPER_ROWS_WIDE if has_long_tiles else range(0)


def _is_many(num_rows: int, weight: Float8Weight) -> bool:
    """Return whether the GEMM of many rows is the fastest for more than 64 rows."""
    # torch rounds rows to float8 in parts, and is as fast with scales of tiles.
    is_narrow = weight.shape[0] <= _NARROW and num_rows <= _MANY_MAX_ROWS_TILED
    return weight.height == 1 or is_narrow


def has_gemv(weight: Float8Weight) -> bool:
    """Return whether the GEMV for Hopper GPUs multiplies a weight."""
    return gemv_tiling.unsupported_reason(weight) is None


def has_hopper(weight: Float8Weight) -> bool:
    """Return whether the GEMM for Hopper GPUs multiplies a weight by contiguous float8 rows."""
    return hopper_tiling.float8_unsupported_reason(weight) is None


def has_many(weight: Float8Weight) -> bool:
    """Return whether the GEMM of many rows for Hopper GPUs multiplies a weight."""
    return many_tiling.unsupported_reason(weight) is None


def has_torch(weight: Float8Weight) -> bool:
    """Return whether torch's own kernels multiply a weight.

    They do if each row has a scale, and sizes are multiples of 16; or, on Hopper GPUs with CUDA 12.9 or
    later, if each tile of 128 x 128 has a scale, N is a multiple of 128, and K one of 512, as they need a
    multiple of 4 scales along K.
    """
    num_rows, size = weight.shape
    if weight.width == size:
        return weight.height == 1 and num_rows % 16 == size % 16 == 0
    is_whole = num_rows % _BLOCK == size % (4 * _BLOCK) == 0
    return (weight.height, weight.width) == (_BLOCK, _BLOCK) and is_whole and _has_blockwise(weight.device)


@cache
def _has_blockwise(device: torch.device) -> bool:
    return nvidia_generation(device) == 9 and TorchVersion(torch.version.cuda or "0") >= "12.9"


@cache
def choose_tiling(num_rows: int, num_weight_rows: int, size: int) -> Float8Tiling:
    """Return the tiling for the GEMM of M float8 rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M.
        num_weight_rows: N, gate and up counted.
        size: K.
    """
    rows = next((r for r in (16, 32, 64) if num_rows <= r), 128)
    if rows == 128 or num_weight_rows >= _WIDE:
        return Float8Tiling(rows, 128, 128, 8, 4)
    return Float8Tiling(rows, 64, 256, 4, 6) if size >= _LONG else Float8Tiling(rows, 64, 128, 4, 8)
