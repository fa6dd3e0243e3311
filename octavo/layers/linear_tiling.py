"""How products of few rows are tiled.

Measured on an H200 for one row; for more, from what the compiler makes of a tiling (registers, shuffles).
"""

from dataclasses import dataclass

import torch

# More rows than this go to cuBLAS.
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile of one program; powers of two.

    Attributes:
        columns: rows of the weight a program multiplies; at least 2 where gate and up alternate.
        depth: of K per iteration, at least 8. A multiple of what the warps load at once, 512 bytes each,
            spares x a detour through shared memory.
        num_warps: warps per program. They share the columns, so that each has all sums to add up at the end.
    """

    columns: int
    depth: int
    num_warps: int


def choose_tiling(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling for a product of M rows and a weight [num_weight_rows, size].

    Args:
        num_rows: M, 1 to MAX_ROWS.
        num_weight_rows: N, gate and up counted.
        size: K.
        dtype: of weights and rows; wider ones than 2 bytes get less of K at a time.
    """
    is_short, is_wide = size < 4096, num_weight_rows >= 65536
    if num_weight_rows <= 2048:
        # Few programs: many warps each, so that enough is under way.
        tile = (2, 2048, 8) if num_rows <= 2 else (4, 1024, 4)
    elif num_rows > 2:
        # Many sums: few warps, since each adds up its part of all of them.
        tile = (8 if is_wide else 4, 256, 1) if is_short else (8, 512, 2)
    elif num_rows == 1 and is_short:
        tile = (8 if is_wide else 4, 512, 4)
    else:
        tile = (4, 1024, 2)
    columns, depth, num_warps = tile
    smallest = max(16, 1 << (size - 1).bit_length())
    return Tiling(columns, min(depth // (dtype.itemsize // 2), smallest), num_warps)
