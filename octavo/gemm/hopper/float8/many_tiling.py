"""Where the GEMM of many float8 rows runs, and how it is tiled: by measurement on an H200."""

from dataclasses import dataclass
from functools import cache

from octavo.forms.float8 import Float8Weight
from octavo.kernels.device import nvidia_generation

# Rows of x of a tile and of a warpgroup.
TILE_ROWS = 128
HALF_ROWS = TILE_ROWS // 2
# Columns of a step, a byte each; steps whose products tensor cores add up: 512 columns.
STEP = 128
_SPAN = 4
# Shared memory of an SM, less that of barriers; bytes of a number of the result.
_SHARED_BYTES = 231_000
_RESULT_BYTES = 2
# Columns of a tile's two parts: for gate and up; with a residual or a bias, which take registers; otherwise.
_GATED = ((64, 32), (64, 0), (32, 0))
_ADDING = ((128, 0), (64, 0), (32, 0))
_PLAIN = ((128, 64), *_ADDING)
# Tiles below one another that run at the same time; 1 where one row of tiles keeps all programs busy.
_GROUP = 16
_NARROW = 4096


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """A program's tile: 128 rows of x, and columns of the result in one or two parts.

    Attributes:
        columns: of the first part, a power of two.
        extra: of the second part, a power of two, or 0.
        stages: steps of 128 columns of K in shared memory.
        span: steps whose products are added up by tensor cores.
        group: tiles below one another that follow one another.
    """

    columns: int
    extra: int
    stages: int
    span: int
    group: int


def unsupported_reason(weight: Float8Weight) -> str | None:
    """Return why this GEMM cannot run with a weight [N, K], or None if it can."""
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(weight)


def misfit(weight: Float8Weight) -> str | None:
    """Return why a Hopper GPU's GEMM of many float8 rows cannot multiply by a weight, or None if it can."""
    num_rows, size = weight.shape
    if (weight.height, weight.width) == (1, size):
        fits = num_rows % 16 == size % 16 == 0
    else:
        # Gate and up, hence each half of a program's tile, must stay within one row of scale tiles.
        is_square = weight.height == weight.width == STEP
        fits = is_square and num_rows % (2 * STEP) == size % STEP == 0
    if fits:
        return None
    return (
        "it needs a weight [N, K] with a scale for each row, N and K multiples of 16, or for 128 x 128 "
        "numbers, N a multiple of 256 and K of 128; "
        f"got {[num_rows, size]}, tiles of {weight.height} x {weight.width}"
    )


@cache
def tiling_for(
    num_rows: int, num_weight_rows: int, num_programs: int, halves: int, *, adds: bool, is_tiled: bool
) -> ManyTiling:
    """Return the tiling for the GEMM of M rows and a weight of N rows that reads least per program.

    Args:
        num_rows: M.
        num_weight_rows: N, gate and up counted.
        num_programs: that run at the same time.
        halves: 2 with an activation, else 1.
        adds: whether a residual or a bias is added.
        is_tiled: whether a scale is for 128 x 128 numbers of the weight.
    """
    parts = _GATED if halves == 2 else _ADDING if adds else _PLAIN
    if is_tiled:
        parts = tuple(part for part in parts if part[1] == 0)
    down = -(-num_rows // TILE_ROWS)

    def rows_read(part: tuple[int, int]) -> int:
        across = -(-num_weight_rows // (halves * sum(part)))
        return -(-down * across // num_programs) * (TILE_ROWS + halves * sum(part))

    columns, extra = min(parts, key=rows_read)
    group = 1 if num_weight_rows <= _NARROW else _GROUP
    return fill_tiling(columns, extra, halves, group, 1 if is_tiled else _SPAN)


def fill_tiling(columns: int, extra: int, halves: int, group: int = _GROUP, span: int = _SPAN) -> ManyTiling:
    """Return a tiling with as many stages as fit into shared memory; see ManyTiling."""
    width = columns + extra
    room = _SHARED_BYTES - TILE_ROWS * width * _RESULT_BYTES
    return ManyTiling(columns, extra, room // (STEP * (TILE_ROWS + halves * width)), span, group)
