"""Where the row-invariant GEMM runs, and how it is tiled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.device import has_triton


@dataclass(frozen=True, slots=True)
class InvariantTiling:
    """Tile of one program.

    Attributes:
        rows: of the result, 64 or 128, 64 per 4 warps: fewer would take another tensor-core instruction.
        columns: of the result, a power of two.
        depth: of K per iteration, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_columns: int) -> int:
        """Return how many tiles a result of that size has."""
        return -(-num_rows // self.rows) * -(-num_columns // self.columns)


# From large to small.
HALF_TILINGS = (
    InvariantTiling(128, 256, 64, 8, 3),
    InvariantTiling(128, 128, 64, 8, 4),
    InvariantTiling(64, 64, 64, 4, 4),
    InvariantTiling(64, 32, 128, 4, 4),
    InvariantTiling(64, 16, 128, 4, 5),
)
# Exact float32 products do not run on tensor cores: there is nothing to choose for speed.
FLOAT32_TILING = InvariantTiling(64, 32, 16, 4, 2)


def unsupported_reason(weight: Tensor) -> str | None:
    """Return why the GEMM with a weight cannot be row-invariant here, or None if they can."""
    if has_triton(weight):
        return None
    return (
        "it needs bfloat16, float16 or float32 weights on an NVIDIA GPU with Triton, "
        f"got {weight.dtype} weights on {weight.device}"
    )


def tiling_for(num_rows: int, num_columns: int, dtype: torch.dtype, min_programs: int) -> InvariantTiling:
    """Return the largest tiling of no more rows than x has that makes min_programs; else the smallest.

    Args:
        num_rows: M.
        num_columns: N.
        dtype: of x and weight.
        min_programs: that keep the GPU busy.
    """
    if dtype == torch.float32:
        return FLOAT32_TILING
    for tiling in HALF_TILINGS:
        num_programs = tiling.num_programs(num_rows, num_columns)
        if tiling.rows <= max(64, num_rows) and num_programs >= min_programs:
            return tiling
    return HALF_TILINGS[-1]
