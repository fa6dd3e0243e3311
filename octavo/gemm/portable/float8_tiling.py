"""Which float8 weights portable and torch's kernels multiply, and how they are tiled."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.torch_version import TorchVersion

from octavo.forms.float8 import Float8Weight

_BLOCK = 128
_WIDE = 16384
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


def has_tiles(weight: Float8Weight) -> bool:
    """Return whether the kernels can multiply a weight's tiles: rows, or a power of two, 32 or more, wide."""
    is_power = weight.width & (weight.width - 1) == 0
    return weight.width == weight.shape[1] or (is_power and weight.width >= 32)


def torch_fits_rows(weight: Float8Weight) -> bool:
    """Return whether torch's own product multiplies by a weight with a scale for each row."""
    num_rows, size = weight.shape
    return (weight.height, weight.width) == (1, size) and num_rows % 16 == size % 16 == 0


def torch_fits_tiles(weight: Float8Weight) -> bool:
    """Return whether torch's own product multiplies by a weight with a scale for each 128 x 128 numbers.

    It does on Hopper GPUs with CUDA 12.9 or later, if N is a multiple of 128, and K one of 512, as it needs a
    multiple of 4 scales along K.
    """
    num_rows, size = weight.shape
    is_tiled = (weight.height, weight.width) == (_BLOCK, _BLOCK) and weight.width < size
    return is_tiled and num_rows % _BLOCK == size % (4 * _BLOCK) == 0 and _has_blockwise()


@cache
def _has_blockwise() -> bool:
    return TorchVersion(torch.version.cuda or "0") >= "12.9"


@cache
def tiling_for(num_rows: int, num_weight_rows: int, size: int) -> Float8Tiling:
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
