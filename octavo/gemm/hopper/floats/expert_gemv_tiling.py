"""Where the GEMV of experts in floats runs, and how it is tiled. Importing this imports no Triton."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.forms.float8 import FLOAT8
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, X_STEP
from octavo.kernels.device import nvidia_generation

MAX_TOKENS = 4
# Most registers of a thread: two programs fit on an SM.
REGISTERS = 104
# Bytes of shared memory. A program of gate and up takes more than half of an SM's and leaves room for one of
# down: two of them on an SM would have twice the work, while other SMs idle.
_HALF, _DOWN_BYTES = 116_000, 97_000
# TMA copies powers of two.
_BLOCKS = (4, 2, 1)
LEAST_STAGES = 3
# Most atoms of a warp and a row of the weight, if each has a scale.
_MOST_ATOMS = 16


@dataclass(frozen=True, slots=True)
class FloatTiling:
    """What a program has in shared memory.

    Attributes:
        blocks: atoms of each warp per step, of TILE_ROWS rows.
        x_steps: times X_STEP numbers of x for a token.
        stages: steps in shared memory.
    """

    blocks: int
    x_steps: int
    stages: int


def unsupported_reason(x: Tensor, weight: ExpertsWeight, summed: int) -> str | None:
    """Return why the GEMV cannot run, or None if it can. Called per layer and step.

    Args:
        x: of the layer, [T, hidden]; that between both products is always contiguous.
        weight: [E, N, K], of gate and up, or of down.
        summed: see float_tiling_for.
    """
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(x, weight, summed)


def misfit(x: Tensor, weight: ExpertsWeight, summed: int) -> str | None:
    """Return why a Hopper GPU's GEMV cannot run, or None if it can; arguments as for unsupported_reason."""
    if not isinstance(weight, ExpertWeight) or weight.bias is not None:
        return "it needs experts in bfloat16, float16 or float8, without biases"
    values = weight.values
    if not 0 < len(x) <= MAX_TOKENS:
        return f"it needs 1 to {MAX_TOKENS} tokens, got {len(x)}"
    _, num_rows, size = weight.shape
    atom = ATOM_BYTES // values.itemsize
    if (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and values.dtype in (x.dtype, FLOAT8)
        and values.data_ptr() % 16 == 0
        and (weight.scales is None) == (values.dtype == x.dtype)
        and num_rows >= 2 * TILE_ROWS
        # Rows of x follow one another, and warps take an atom of each in turn.
        and size % (WARPS * atom) == 0
        and (weight.width in (0, size) or size <= _MOST_ATOMS * WARPS * atom)
        and float_tiling_for(size, values.itemsize, len(x), summed).stages >= LEAST_STAGES
    ):
        return None
    return (
        f"it needs contiguous rows in half precision, N >= {2 * TILE_ROWS}, K a multiple of {WARPS * atom} "
        f"and so short that {summed} rows of x for each token, or scales of tiles, leave room for weights; "
        f"got {list(x.shape)} {x.dtype}, {[num_rows, size]} {values.dtype}, a scale for {weight.width}"
    )


@cache
def float_tiling_for(size: int, itemsize: int, num_tokens: int, summed: int) -> FloatTiling:
    """Return the tiling of gate and up, or of down.

    Args:
        size: K.
        itemsize: bytes of a number of the weight.
        num_tokens: T.
        summed: experts whose products a tile adds up: 1 of gate and up, k of down.
    """
    atoms = size * itemsize // (ATOM_BYTES * WARPS)

    def make(blocks: int) -> FloatTiling:
        padded = (summed - 1) * atoms + -(-atoms // blocks) * blocks
        x_steps = -(-padded * WARPS * ATOM_BYTES // (itemsize * X_STEP))
        x_bytes, stage_bytes = 2 * num_tokens * x_steps * X_STEP, blocks * WARPS * TILE_ROWS * ATOM_BYTES
        stages = (
            -((x_bytes - _HALF) // stage_bytes) if summed == 1 else (_DOWN_BYTES - x_bytes) // stage_bytes
        )
        return FloatTiling(blocks, x_steps, stages)

    def cost(tiling: FloatTiling) -> tuple[bool, int]:
        # Prefer a small number of steps, and of columns past the end of K: a step costs as much as an atom.
        return tiling.stages < LEAST_STAGES, -(-atoms // tiling.blocks) * (tiling.blocks + 1)

    return min(map(make, _BLOCKS), key=cost)
