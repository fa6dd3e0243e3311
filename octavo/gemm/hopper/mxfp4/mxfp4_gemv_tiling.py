"""Where the GEMV of a single token's experts runs, and how it is tiled. Importing this imports no Triton."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, num_spans
from octavo.kernels.device import nvidia_generation

# Columns of a result that a program computes at once. Tensor cores multiply twice as many rows of weights:
# of gate and up, or of two experts.
COLUMNS = 8
# Warps that share K, a span each: two for each scheduler, as products wait for one another.
WARPS = 8
SPAN = 128
# Most registers of a thread: two programs fit on an SM.
REGISTERS = 80
# Bytes of shared memory. Those of gate and up and those of down fit on an SM together, and so do down's and a
# GEMV's, but never two of one kind: they would sit two by two on some SMs, with twice the work.
_GATE_UP_BYTES, _DOWN_BYTES = 117_000, 97_000
# What 16 rows of weights take in a step.
_UNIT_BYTES = 2 * COLUMNS * WARPS * (16 + 1) * 4
# Bytes of rows of x in a step, for both halves of the rows of weights.
_ROW_BYTES = 2 * WARPS * SPAN * 2
_LEAST_STAGES = 3


@dataclass(frozen=True, slots=True)
class Mxfp4GemvTiling:
    """What a program has in shared memory.

    Attributes:
        parts: pairs of rows of x: 1 for gate and up, which have one row twice, else half as many as experts.
        units: times 16 rows of weights in a step.
        stages: steps.
    """

    parts: int
    units: int
    stages: int


def unsupported_reason(x: Tensor, weight: ExpertsWeight, num_chosen: int) -> str | None:
    """Return why the GEMV cannot run, or None if it can. Called per layer and step.

    Args:
        x: of either product, [1 or k, K].
        weight: [E, N, K].
        num_chosen: k.
    """
    if nvidia_generation(weight.device) != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), got a weight on {weight.device}"
    return misfit(x, weight, num_chosen)


def misfit(x: Tensor, weight: ExpertsWeight, num_chosen: int) -> str | None:
    """Return why a Hopper GPU's GEMV cannot run, or None if it can; arguments as for unsupported_reason."""
    if not isinstance(weight, Mxfp4ExpertWeight):
        return "it needs experts in MXFP4"
    _, num_rows, size = weight.shape
    if (
        x.dtype == torch.bfloat16
        and num_chosen % 2 == 0
        and num_rows % 8 == 0
        and all(
            mxfp4_gemv_tiling_for(size, num_chosen, is_gated=is_gated).stages >= _LEAST_STAGES
            for is_gated in (True, False)
        )
    ):
        return None
    return (
        "it needs rows in bfloat16, an even number of experts for a token, N a multiple of 8, and K so short "
        f"that as many rows leave room for weights; got {x.dtype}, {num_chosen} experts, {[num_rows, size]}"
    )


def copy_boxes(*, is_gated: bool) -> tuple[list[int], list[int]]:
    """Return the boxes of words and of exponents that TMA copies: of gate and up, or of an expert of down."""
    if is_gated:
        return [2, 1, WARPS, 2 * COLUMNS, 16], [2, 1, WARPS, 2 * COLUMNS]
    return [1, WARPS, COLUMNS, 16], [1, WARPS, COLUMNS]


@cache
def mxfp4_gemv_tiling_for(size: int, num_chosen: int, *, is_gated: bool) -> Mxfp4GemvTiling:
    """Return the tiling of gate and up, or of down.

    Args:
        size: K.
        num_chosen: k.
        is_gated: of gate and up.
    """
    num_steps = -(-num_spans(size) // WARPS)
    parts = 1 if is_gated else num_chosen // 2
    units = 2 if is_gated or parts % 2 == 0 else 1
    room = (_GATE_UP_BYTES if is_gated else _DOWN_BYTES) - parts * num_steps * _ROW_BYTES
    return Mxfp4GemvTiling(parts, units, room // (units * _UNIT_BYTES))
