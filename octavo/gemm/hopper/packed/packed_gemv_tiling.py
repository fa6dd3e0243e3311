"""Where the GEMV with packed weights runs, and how it is tiled: by measurement on an H200."""

from functools import cache

from octavo.forms.packed import PackedWeight, span_columns
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS, GemvTiling
from octavo.kernels.device import nvidia_generation

# Columns of a span of 4-bit words, which has two groups, and spans of the row that all warps convert at once.
SPAN = span_columns(4)
GROUP = SPAN // 2
SPANS_AT_ONCE = 16
# Warps that share K: two for each scheduler, as products wait for one another.
WARPS = 8
# Spans of a warp in a step, and its bytes: words, scales and minimums.
_BLOCKS = 1
_STEP_BYTES = _BLOCKS * WARPS * TILE_ROWS * (32 + 2) * 4
# Bytes of the row's digits, and of the sums of its groups, for spans that are converted at once.
_ROW_BYTES = SPANS_AT_ONCE * (4 * SPAN + 2 * 4)
_SHARED_BYTES = 112_000
_REGISTERS = 80
_MAX_SIZE = 16_384


def unsupported_reason(weight: PackedWeight) -> str | None:
    """Return why the GEMV cannot run with a weight and a row in half precision, or None if it can."""
    if nvidia_generation(weight.words.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.words.device}"
    return misfit(weight)


def misfit(weight: PackedWeight) -> str | None:
    """Return why a Hopper GPU's GEMV cannot multiply by a weight, or None if it can."""
    num_rows, size = weight.shape
    if (
        weight.bits == 4
        and weight.group == GROUP
        and size <= _MAX_SIZE
        and num_rows % 8 == 0
        and num_rows >= 32
    ):
        return None
    return (
        f"it needs a weight [N, K] of 4 bits in groups of {GROUP}, N a multiple of 8 and at least 32, "
        f"K <= {_MAX_SIZE}; got {[num_rows, size]}, {weight.bits} bits, groups of {weight.group}"
    )


@cache
def tiling_for(size: int) -> GemvTiling:
    """Return the tiling for rows of K numbers, whose blocks are spans; size: K."""
    room = _SHARED_BYTES - -(-size // (SPANS_AT_ONCE * SPAN)) * _ROW_BYTES
    return GemvTiling(_BLOCKS, room // _STEP_BYTES, _REGISTERS)
