"""Where the GEMV of packed experts runs, and how it is tiled. Importing this imports no Triton."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP, SPAN, SPANS_AT_ONCE, WARPS
from octavo.kernels.device import nvidia_generation

REGISTERS = 80
LEAST_STAGES = 3
# Spans whose scales fill an atom of shared memory, as TMA swizzles it.
_LEAST_BOX = 4
# Columns of a row that are converted at once, and most of a row: threads hold all of them.
_ROW_STEP = SPANS_AT_ONCE * SPAN
_MAX_COLUMNS = 4 * _ROW_STEP
# Bytes of a column of the row: its digits, and its share of the sums of groups.
_COLUMN_BYTES = 4 + 8 / SPAN
# Bytes of a step: words, scales and minimums.
_STEP_BYTES = WARPS * TILE_ROWS * (32 + 2) * 4
# Bytes of shared memory; see float_gemv.tiling.
_HALF, _DOWN_BYTES = 116_000, 104_000


@dataclass(frozen=True, slots=True)
class PackedGemvTiling:
    """How a row meets experts, and what a program has in shared memory.

    Attributes:
        box: spans of an expert that a step has, 4 or one for each warp.
        padded: columns that an expert takes of the row: whole boxes.
        columns: of the row.
        stages: steps in shared memory.
    """

    box: int
    padded: int
    columns: int
    stages: int


def unsupported_reason(x: Tensor, weight: ExpertsWeight, summed: int) -> str | None:
    """Return why the GEMV cannot run, or None if it can. Called per layer and step.

    Args:
        x: of the layer, [1, hidden]; that between both products is always contiguous.
        weight: [E, N, K], of gate and up, or of down.
        summed: see tiling_for.
    """
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(x, weight, summed)


def misfit(x: Tensor, weight: ExpertsWeight, summed: int) -> str | None:
    """Return why a Hopper GPU's GEMV cannot run, or None if it can; arguments as for unsupported_reason."""
    if not isinstance(weight, PackedExpertWeight):
        return "it needs packed experts"
    _, num_rows, size = weight.shape
    if (
        len(x) == 1
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and (weight.bits, weight.group, weight.order) == (4, GROUP, None)
        and num_rows % TILE_ROWS == 0
        and tiling_for(size, summed).columns <= _MAX_COLUMNS
    ):
        return None
    return (
        f"it needs a contiguous row in half precision and experts of 4 bits in groups of {GROUP}, columns in "
        f"their order, N a multiple of {TILE_ROWS}, up to {_MAX_COLUMNS} columns of x for {summed} of them; "
        f"got {list(x.shape)} {x.dtype}, {[num_rows, size]}, {weight.bits} bits, groups of {weight.group}"
    )


@cache
def tiling_for(size: int, summed: int) -> PackedGemvTiling:
    """Return the tiling of gate and up, or of down.

    Args:
        size: K.
        summed: experts whose products a tile adds up: 1 of gate and up, k of down.
    """
    spans = -(-size // SPAN)
    box = min(WARPS, max(_LEAST_BOX, 1 << (spans - 1).bit_length()))
    padded = -(-spans // box) * box * SPAN
    columns = -(-summed * padded // _ROW_STEP) * _ROW_STEP
    room = int(columns * _COLUMN_BYTES)
    stages = -((room - _HALF) // _STEP_BYTES) if summed == 1 else (_DOWN_BYTES - room) // _STEP_BYTES
    return PackedGemvTiling(box, padded, columns, max(stages, LEAST_STAGES))
