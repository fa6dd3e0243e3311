"""Where the GEMM with packed weights for Hopper GPUs runs, and how it is tiled. Imports no Triton."""

from dataclasses import dataclass
from functools import cache
from itertools import product

from torch import Tensor

from octavo.gpu.device import nvidia_generation
from octavo.layers.linear.grouped.weight import PLANE, GroupedWeight

# Columns of K that lie side by side in shared memory, 128 bytes of x.
ATOM = 64
# Rows of the weight that two warpgroups multiply by one wgmma each.
TILE = 128
_SPAN = 256
# Shared memory for rows and words: all of an SM's, but for barriers.
_SHARED_BYTES = 224 * 1024
# What the choice of a tiling counts with, in clock cycles of one SM: products of 16-bit numbers, bytes from
# the L2 cache, and the second launch that adds up parts of K.
_PRODUCTS_PER_CYCLE = 2048
_BYTES_PER_CYCLE = 27
_LAUNCH_CYCLES = 3500


@dataclass(frozen=True, slots=True)
class HopperMediumTiling:
    """Tile of one program of hopper_medium_linear.

    Attributes:
        rows: of x: 32, 64 or 128.
        tiles: of TILE rows of the weight: 1 or 2.
        row_stages: buffers for 128 columns of x, an even number.
        word_stages: buffers for 256 columns of the weight, at least half as many as row_stages, and 2: the
            last half of a span makes room only when the next span is multiplied.
        num_splits: parts of K, each multiplied by programs of its own; another launch adds them up.
    """

    rows: int
    tiles: int
    row_stages: int
    word_stages: int
    num_splits: int = 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of its buffers."""
        return 2 * TILE * self.rows * self.row_stages + 4 * PLANE * TILE * self.tiles * self.word_stages


def unsupported_reason(x: Tensor, weight: GroupedWeight, *, is_gated: bool) -> str | None:
    """Return why Hopper's kernel cannot multiply x [M, K] and a packed weight, or None if it can.

    Called per layer and step.
    """
    if nvidia_generation(weight.words.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.words.device}"
    if weight.bits != 4:
        return f"it needs a weight of 4 bits, got {weight.bits}"
    if is_gated and weight.shape[0] % 16:
        return f"gate and up must have a multiple of 8 rows each, got {weight.shape[0]} together"
    if x.stride(0) % 8 or x.shape[1] % 8 or x.data_ptr() % 16:
        return (
            "x [M, K] must have K a multiple of 8, an address and rows of a multiple of 16 bytes, got "
            f"{list(x.shape)} with strides {list(x.stride())}"
        )
    return None


def make_tiling(rows: int, tiles: int, num_splits: int = 1) -> HopperMediumTiling:
    """Return a tiling with as many buffers as fit into shared memory.

    Args:
        rows: as in HopperMediumTiling.
        tiles: as in HopperMediumTiling.
        num_splits: as in HopperMediumTiling.
    """
    row_stages = {32: 8, 64: 6, 128: 4}[rows]
    space = _SHARED_BYTES - 2 * TILE * rows * row_stages
    return HopperMediumTiling(
        rows, tiles, row_stages, min(8, space // (4 * PLANE * TILE * tiles)), num_splits
    )


@cache
def choose_hopper_medium_tiling(
    num_rows: int, num_weight_rows: int, size: int, num_multiprocessors: int
) -> HopperMediumTiling:
    """Return the tiling for M rows and a weight [N, K], gate and up counted.

    Wide tiles read x less often, and parts of K give every SM work: clock cycles are counted. With 128 rows,
    sums of two tiles leave no registers to unpack ahead: one tile is up to 1.4 times as fast on an H200.

    Args:
        num_rows: M.
        num_weight_rows: N.
        size: K.
        num_multiprocessors: of the GPU.
    """
    rows = next((rows for rows in (32, 64) if num_rows <= rows), 128)
    num_spans = -(-size // _SPAN)

    def cycles(choice: tuple[int, int]) -> float:
        tiles, splits = choice
        height = TILE * tiles
        multiply = height * rows * _SPAN / _PRODUCTS_PER_CYCLE
        fetch = (2 * rows + height / 2) * _SPAN / _BYTES_PER_CYCLE
        programs = -(-num_rows // rows) * -(-num_weight_rows // height) * splits
        waves = -(-programs // num_multiprocessors)
        add = _LAUNCH_CYCLES + waves * 16 * height * rows / _BYTES_PER_CYCLE
        return waves * -(-num_spans // splits) * max(multiply, fetch) + (add if splits > 1 else 0)

    heights = (2, 1) if rows < 128 else (1,)
    tiles, splits = min(product(heights, range(1, min(8, num_spans) + 1)), key=cycles)
    return make_tiling(rows, tiles, splits)
