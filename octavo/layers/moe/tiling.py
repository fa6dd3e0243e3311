"""How the products of experts are tiled. Importing this imports no Triton."""

from dataclasses import dataclass

import torch

from octavo.layers.linear.skinny_tiling import Tiling

# Of products of 1 to 4 tokens, each pair by itself.
GATE_UP_TILING = Tiling(columns=4, depth=1024, num_warps=2)
DOWN_TILING = Tiling(columns=4, depth=1024, num_warps=2)

# Rows of a tile that never change, for deterministic steps.
_ONE_FOR_ALL = 64


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """Tile of one program.

    Attributes:
        rows: of x, a power of two, at least 16.
        columns: of the result, a power of two, at least 64 for tensor cores; with an activation as many of
            gate as of up.
        depth: of K per iteration, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    tma: bool = False


def choose_grouped_tiling(
    rows_per_expert: float, dtype: torch.dtype, *, is_gated: bool, deterministic: bool
) -> GroupedTiling:
    """Return the tiling of a product.

    Args:
        rows_per_expert: on average, with all experts in use.
        dtype: of x and weights.
        is_gated: an activation halves the columns.
        deterministic: one tiling for any number of rows, so that no row's bits depend on it.
    """
    if dtype == torch.float32:
        return GroupedTiling(16, 32, 16, 4, 2)
    if deterministic:
        return GroupedTiling(_ONE_FOR_ALL, 64, 64, 4, 4)
    columns = 64 if is_gated else 128
    if rows_per_expert <= 12:
        return GroupedTiling(16, columns, 128, 4, 4)
    if rows_per_expert <= 24:
        return GroupedTiling(32, columns, 128, 4, 3)
    if rows_per_expert <= 64:
        return GroupedTiling(64, columns, 64, 4, 4)
    return GroupedTiling(128, 128, 64, 8, 3)


def row_slots(num_tokens: int, rows_per_expert: float, rows: int) -> int:
    """Return how many programs share an expert's tiles of rows, for each tile of columns.

    Twice the average number of tiles: programs without a tile end at once, and experts with more give each
    program several.

    Args:
        num_tokens: T, which no expert has more rows than.
        rows_per_expert: on average.
        rows: of a tile.
    """
    average = -(-rows_per_expert // rows)
    return int(min(-(-num_tokens // rows), 1 if average <= 1 else 2 * average))
