"""Where the Hopper kernel of MXFP4 experts runs, and how it is tiled. Importing this imports no Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.kernels.device import nvidia_generation

# Rows of the weight in a tile: two warpgroups have 64 each.
TILE = 128
# Columns of half a span, as many as TMA's widest swizzle takes.
ATOM = 64
SPAN = 128
# Bytes of shared memory for stages; the rest of the 227 KB is scratch for transposing results.
_STAGE_BYTES = 210_000
# Bytes of a span of a tile's words.
_WORD_BYTES = TILE * 16 * 4
# Up to so many rows of an expert, tiles have 64 rows: two programs on an SM make up for words read twice.
_MOST_OF_64 = 128


def unsupported_reason(x: Tensor, weight: ExpertsWeight) -> str | None:
    """Return why the kernel cannot run, or None if it can. Called per layer and step.

    Args:
        x: of either product, [rows, K].
        weight: [E, N, K].
    """
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(x, weight)


def misfit(x: Tensor, weight: ExpertsWeight) -> str | None:
    """Return why a Hopper GPU's kernel cannot run, or None if it can; arguments as for unsupported_reason."""
    if not isinstance(weight, Mxfp4ExpertWeight):
        return "it needs experts in MXFP4"
    _, num_rows, size = weight.shape
    if x.dtype == torch.bfloat16 and num_rows % 16 == 0 and size % ATOM == 0:
        return None
    return f"it needs rows in bfloat16, N a multiple of 16 and K of 64; got {x.dtype}, {[num_rows, size]}"


@dataclass(frozen=True, slots=True)
class Mxfp4ManyTiling:
    """How programs share the work.

    Attributes:
        rows: of x in a tile, a power of two from 8 to 128.
        programs: on each SM.
        stages: spans in shared memory at a time.
        registers: of a thread, before the TMA warp gives most of its share to those that multiply.
    """

    rows: int
    programs: int
    stages: int
    registers: int


def mxfp4_many_tiling_for(rows_per_expert: float) -> Mxfp4ManyTiling:
    """Return the tiling for so many rows of an expert on average."""
    return make_tiling(64 if rows_per_expert <= _MOST_OF_64 else 128)


def make_tiling(rows: int) -> Mxfp4ManyTiling:
    """Return a tiling with so many rows of x."""
    # Sums of 128 rows take half of the registers.
    programs = 1 if rows == 128 else 2
    stages = _STAGE_BYTES // programs // (_WORD_BYTES + 2 * SPAN * rows)
    # The TMA warp counts as a third warpgroup.
    return Mxfp4ManyTiling(rows, programs, stages, 65536 // (384 * programs) // 8 * 8)
