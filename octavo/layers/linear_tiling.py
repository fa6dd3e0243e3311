"""How products of few rows are tiled: what measured best on an H200."""

from dataclasses import dataclass

import torch

# More rows than this go to cuBLAS.
MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile of one program.

    Attributes:
        rows: 1: one row on the vector units; 16, 32 or 64: up to that many on the matrix units.
        columns: columns of the result a program owns, a power of two.
        depth: of K per iteration, a power of two; on the matrix units per warp, and at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline; on the vector units weights are loaded one iteration
            ahead, whatever this says.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int = 1


def choose_tiling(
    num_rows: int, num_columns: int, size: int, *, is_gated: bool, dtype: torch.dtype
) -> Tiling:
    """Return the tiling for num_rows x size times size x num_columns.

    Args:
        num_rows: M, 1 to 64.
        num_columns: of the result: half of the weight's rows if is_gated.
        size: K.
        is_gated: a program computes a gate and an up column for each of its columns.
        dtype: of weights and rows; wider ones than 2 bytes get less of K at a time.
    """
    shrink = dtype.itemsize // 2
    # Programs enough to give each of about 132 multiprocessors two.
    wide = num_columns >= 8192
    if num_rows == 1:
        columns = (4 if wide else 2) // (2 if is_gated else 1)
        return Tiling(1, columns, min(1024 // shrink, _power_of_two(size)), 4)
    rows = max(16, _power_of_two(num_rows))
    columns = (32 if wide else 16) // (2 if is_gated else 1)
    return Tiling(rows, columns, 64 // shrink, 4, 4 if rows < 64 else 3)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
