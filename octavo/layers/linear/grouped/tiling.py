"""How products with packed weights are tiled. Importing this imports no Triton."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

# Rows of two tensor core tiles.
FEW_MAX_ROWS = 16
# As many programs as run at a time on a large GPU.
_MANY_PROGRAMS = 264
# For more rows, it pays off to make floats of the whole weight.
_SOME_MAX_ROWS = 256


def choose_grouped_gemm(num_rows: int) -> Literal["few", "some", "plain"]:
    """Return the GEMM for M rows. Called per layer and step."""
    if num_rows <= FEW_MAX_ROWS:
        return "few"
    return "some" if num_rows <= _SOME_MAX_ROWS else "plain"


@dataclass(frozen=True, slots=True)
class FewTiling:
    """Tile of one program of few_linear; powers of two.

    Attributes:
        columns: rows of the weight, 16 or more.
        num_warps: that share K.
        num_stages: spans of a warp in shared memory, 2 or more.
    """

    columns: int
    num_warps: int
    num_stages: int


@cache
def choose_few_tiling(num_weight_rows: int, size: int) -> FewTiling:
    """Return the tiling for a weight [N, K], gate and up counted."""
    return FewTiling(32 if num_weight_rows > 4096 else 16, 8 if size > 4096 else 4, 3)


@dataclass(frozen=True, slots=True)
class SomeTiling:
    """Tile of one program of some_linear; powers of two.

    Attributes:
        rows: of x, 16 or more.
        columns: rows of the weight, 16 or more.
        num_warps: warps per program.
        num_stages: spans that are fetched ahead, and the one that is multiplied.
        num_splits: parts of K, each multiplied by programs of its own; another launch adds them up.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@cache
def choose_some_tiling(num_rows: int, num_weight_rows: int) -> SomeTiling:
    """Return the tiling for M rows and a weight of N rows, gate and up counted."""
    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    tiles = -(-num_weight_rows // 64) * -(-num_rows // rows)
    splits = max(1, min(8, 1 << (_MANY_PROGRAMS // tiles).bit_length() >> 1))
    return SomeTiling(rows, 64, 4, 2, splits)
