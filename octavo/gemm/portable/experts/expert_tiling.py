"""How the GEMMs of experts are tiled. Importing this imports no Triton."""

from dataclasses import dataclass

import torch

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.forms.packed import PLANE, span_columns
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.portable.skinny_tiling import Tiling
from octavo.kernels.device import nvidia_generation, shared_bytes

AnyExpertWeight = ExpertWeight | Mxfp4ExpertWeight | PackedExpertWeight

# For 1 to 4 tokens, each pair by itself.
FEW_TILING = Tiling(columns=4, depth=1024, num_warps=2)
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
        tma: whether weights are fetched by TMA, which leaves registers to the sums: more stages, and several
            programs at a time on one SM.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    tma: bool


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Tile of one program over packed experts; powers of two.

    Attributes:
        rows: of x, 16 or more.
        columns: rows of the weight, gate and up counted, 32 or more.
        num_warps: warps per program.
        num_stages: spans that are fetched ahead, and the one that is multiplied.
        parts: of K that are multiplied at a time; of 1 to 4 tokens only.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Mxfp4Tiling:
    """Tile of one program over experts in MXFP4; powers of two.

    Attributes:
        rows: of x, 8 or more.
        columns: rows of the weight, gate and up counted, 32 or more.
        parts: of K that are multiplied at a time, by a warp each; or 1, then warps divide the columns.
        num_warps: warps per program.
        num_stages: spans that are fetched ahead, and the one that is multiplied.
        registers: most of a thread, or None.
    """

    rows: int
    columns: int
    parts: int
    num_warps: int
    num_stages: int
    registers: int | None = None


# For 1 to 4 tokens and MXFP4: two warps of a program share K.
MXFP4_FEW_TILING = Mxfp4Tiling(8, 32, 2, 2, 4)
# For rows in float32, without tensor cores: larger tiles spill kilobytes of registers.
FLOAT32_MXFP4_TILING = Mxfp4Tiling(16, 64, 1, 4, 2)


# What a row of gemm.table says of tilings: (weight, rows of an expert on average, is_gated, deterministic).
# is_gated: an activation halves the columns. deterministic: one tiling for any number of rows, so that no
# row's bits depend on it.


def float_pair_tiling(weight: ExpertWeight) -> Tiling:
    """Return the tiling for 1 to 4 tokens."""
    return FEW_TILING


def mxfp4_pair_tiling(weight: Mxfp4ExpertWeight) -> Mxfp4Tiling:
    """Return the tiling for 1 to 4 tokens."""
    return MXFP4_FEW_TILING


def packed_pair_tiling(weight: PackedExpertWeight) -> PackedTiling:
    """Return the tiling for 1 or 2 tokens: warps share K if it is long, else columns."""
    is_long = weight.size >= 8 * span_columns(weight.bits)
    return PackedTiling(8, 32, 4, 3, parts=4) if is_long else PackedTiling(8, 32, 2, 3)


def float_grouped_tiling(
    weight: ExpertWeight, rows_per_expert: float, *, is_gated: bool, deterministic: bool = False
) -> GroupedTiling:
    """Return the tiling of the grouped GEMM with experts in floats, or in float8."""
    rows = _ONE_FOR_ALL if deterministic else _tile_rows(rows_per_expert, (32, 12), (64, 48))
    values = weight.values
    if values.dtype == torch.float32:
        return GroupedTiling(16, 32, 16, 4, 2, tma=False)
    # TMA reads rows that begin at multiples of 16 bytes.
    tma = nvidia_generation(values.device) >= 9 and values.shape[2] * values.itemsize % 16 == 0
    columns = 64 if is_gated or not tma else 128
    # TMA's tiles are best 128 bytes wide, and no tile has more than one scale for a row.
    depth = 128 if values.itemsize == 1 else 64
    if deterministic:
        return GroupedTiling(rows, 64, depth, 4, 4, tma)
    if rows < 128:
        stage_bytes = depth * (2 * rows + values.itemsize * columns * (2 if is_gated else 1))
        # Barriers and sums have the rest.
        num_stages = min(6 if tma else 4, (shared_bytes(values.device) - 2048) // stage_bytes)
        return GroupedTiling(rows, columns, depth, 4, num_stages, tma)
    # Three stages leave room for two programs on an SM.
    return GroupedTiling(rows, columns, depth, 8, 3, tma)


def packed_grouped_tiling(
    weight: PackedExpertWeight, rows_per_expert: float, *, is_gated: bool, deterministic: bool = False
) -> PackedTiling:
    """Return the tiling of the grouped GEMM with packed experts."""
    rows = _ONE_FOR_ALL if deterministic else _tile_rows(rows_per_expert, (16, 6), (32, 24))
    # The program unpacks a tile's words once for all of its rows; two programs with 64 fit on an SM. A third
    # stage with pairs of half planes takes up to 180 KB, more than an A100's program can have.
    fits = weight.group >= PLANE or shared_bytes(weight.words.device) > 180 * 1024
    return PackedTiling(min(rows, 64), 128, 4, 3 if rows <= 32 and fits else 2)


def mxfp4_grouped_tiling(
    weight: Mxfp4ExpertWeight, rows_per_expert: float, *, is_gated: bool, deterministic: bool = False
) -> Mxfp4Tiling:
    """Return the tiling of the grouped GEMM with experts in MXFP4."""
    limits = (8, 1), (16, 8), (32, 24), (64, 48)
    rows = _ONE_FOR_ALL if deterministic else _tile_rows(rows_per_expert, *limits)
    if rows < 128 or nvidia_generation(weight.words.device) < 9:
        # Other GPUs have less memory in an SM. Three programs fit on one, as long as sums are small.
        registers = 168 if rows <= 32 else None
        return Mxfp4Tiling(min(rows, 64), 128, 1, 4, 4 if rows <= 16 else 3, registers)
    return Mxfp4Tiling(rows, 128, 1, 8, 3)


def _tile_rows(rows_per_expert: float, *limits: tuple[int, int]) -> int:
    """Return the rows of a tile by (rows, most rows of an expert on average) in rising order; else 128.

    Tokens do not spread evenly, and an expert's second tile reads its weights once more. So tiles have room
    for several times the average.
    """
    return next((rows for rows, most_per_expert in limits if rows_per_expert <= most_per_expert), 128)


def rounded_tiling(
    weight: ExpertWeight, rows_per_expert: float, *, is_gated: bool, deterministic: bool = False
) -> GroupedTiling:
    """Return the tiling of the grouped GEMM with experts and rows in float8."""
    # Up to so many rows of an expert, tiles have 16 or 32; found by a sweep on an H100.
    most_of_32, many = (64, 128) if is_gated else (24, 64)
    rows = 16 if rows_per_expert <= 3 else 32 if rows_per_expert <= most_of_32 else many
    return GroupedTiling(rows, 64 if is_gated else 128, 128, 4, 4 if rows == 64 else 3, tma=True)


def row_slots(num_tokens: int, rows_per_expert: float, rows: int) -> int:
    """Return how many programs share an expert's tiles of rows, for each tile of columns.

    Twice the average number of tiles, at least 2: programs without a tile end at once, and experts with more
    give each program several.

    Args:
        num_tokens: T, which no expert has more rows than.
        rows_per_expert: on average.
        rows: of a tile.
    """
    average = -(-rows_per_expert // rows)
    return int(min(-(-num_tokens // rows), 2 * max(1, average)))
