"""Where the GEMV of experts in floats runs, and how it is tiled. Importing this imports no Triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.forms.float8 import FLOAT8
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, X_STEP
from octavo.gemm.portable.experts.expert_tiling import AnyExpertWeight
from octavo.kernels.device import nvidia_generation

MAX_TOKENS = 4
# Most registers of a thread: so two programs fit on an SM.
REGISTERS = 104
# Bytes of shared memory. A program of gate and up takes more than half of an SM's and leaves room for one of
# down: two of them on an SM would have twice the work, while other SMs have none.
_HALF, _DOWN_BYTES = 116_000, 97_000
# What TMA copies is a power of two.
_BLOCKS = (4, 2, 1)
LEAST_STAGES = 3
# Of a warp and a row of the weight, if they have a scale each.
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


def can_stream(x: Tensor, weights: Sequence[AnyExpertWeight], num_chosen: int) -> bool:
    """Return whether this GEMV takes a step's tokens; see choice.choose_product."""
    return all(
        len(x) <= most_tokens(weight) and unsupported_reason(x, weight, summed) is None
        for weight, summed in zip(weights, (1, num_chosen), strict=True)
    )


def most_tokens(weight: AnyExpertWeight) -> int:
    """Return up to how many tokens it is the fastest, by measurement on an H200."""
    return MAX_TOKENS if isinstance(weight, ExpertWeight) and weight.scales is not None else 1


def unsupported_reason(x: Tensor, weight: AnyExpertWeight, summed: int) -> str | None:
    """Return why the GEMV cannot run, or None if it can. Called per layer and step.

    Args:
        x: of the layer, [T, hidden]; that between both products is always contiguous.
        weight: [E, N, K], of gate and up, or of down.
        summed: see choose_float_tiling.
    """
    if not isinstance(weight, ExpertWeight) or weight.bias is not None:
        return "it needs experts in bfloat16, float16 or float8, without biases"
    values = weight.values
    if nvidia_generation(values.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {values.device}"
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
        and choose_float_tiling(size, values.itemsize, len(x), summed).stages >= LEAST_STAGES
    ):
        return None
    return (
        f"it needs contiguous rows in half precision, N >= {2 * TILE_ROWS}, K a multiple of {WARPS * atom} "
        f"and so short that {summed} rows of x for each token, or scales of tiles, leave room for weights; "
        f"got {list(x.shape)} {x.dtype}, {[num_rows, size]} {values.dtype}, a scale for {weight.width}"
    )


@cache
def choose_float_tiling(size: int, itemsize: int, num_tokens: int, summed: int) -> FloatTiling:
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
        # Few steps, and few that are partly past the end of K: a step costs as much as an atom more.
        return tiling.stages < LEAST_STAGES, -(-atoms // tiling.blocks) * (tiling.blocks + 1)

    return min(map(make, _BLOCKS), key=cost)
