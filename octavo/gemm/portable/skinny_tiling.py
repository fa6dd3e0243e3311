"""Where the skinny GEMM runs, and how it is tiled: by measurement on an H100."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.device import has_triton

# Maximum rows of x: each keeps its own sums in registers.
MAX_ROWS = 4
_SHORT = 4096


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why the skinny GEMM cannot run with a weight, or None if it can, for up to MAX_ROWS rows."""
    if not has_triton(weight):
        return (
            "it needs bfloat16, float16 or float32 weights on an NVIDIA GPU with Triton, "
            f"got {weight.dtype} weights on {weight.device}"
        )
    if not weight.is_contiguous():
        return f"it needs a contiguous weight, got strides {list(weight.stride())}"
    return None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile of one program; powers of two.

    Attributes:
        columns: rows of the weight a program multiplies; at least 2 where gate and up alternate.
        depth: of K per iteration, at least 8. If it is a multiple of 512 bytes per warp, which a warp loads
            at a time, x does not pass through shared memory.
        num_warps: warps per program. They split the depth, and sum their parts at the end.
    """

    columns: int
    depth: int
    num_warps: int


@cache
def tiling_for(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling for the GEMM of M rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M, 1 to MAX_ROWS.
        num_weight_rows: N, gate and up counted.
        size: K.
        dtype: of weights and rows; wider ones than 2 bytes get less of K at a time.
    """
    if num_weight_rows <= 2048:
        columns, depth, num_warps = 2, 2048, 8
    elif num_rows > 1:
        columns, depth, num_warps = 8, 512, 2
    elif size < _SHORT:
        columns, depth, num_warps = 4, 1024, 2
    else:
        columns, depth, num_warps = 4, 4096, 4
    smallest = max(16, 1 << (size - 1).bit_length())
    return Tiling(columns, min(depth // (dtype.itemsize // 2), smallest), num_warps)
