"""Tile shapes of the Hopper kernels, and the caches they support.

Importing this imports no Triton.
"""

from functools import cache
from types import MappingProxyType

import torch

from octavo.attention.tilings.portable import TileShape
from octavo.kernels.device import num_multiprocessors, nvidia_generation

DECODE_SHAPE = TileShape(16, 32, 1, 3, 4, 255)
"""Decoding, one warp a program."""

WIDE_DECODE_SHAPE = TileShape(16, 16, 1, 3, 4, 255)
"""The same for heads of 256: as many bytes in half as many keys."""

WIDEST_DECODE_SHAPE = TileShape(8, 16, 1, 3, 2, 255)
"""For heads of 512: a warp has registers for 8 rows of results, and twice as many bytes on their way."""

DECODE_SHAPES = MappingProxyType({128: DECODE_SHAPE, 256: WIDE_DECODE_SHAPE, 512: WIDEST_DECODE_SHAPE})
"""By head dimension."""

# Two warpgroups of 64 rows and one fetching warp fill an SM; see tma_prefill.py.
NODE_SHAPE = TileShape(128, 64, 8, 3, 1, 168)
PROMPT_SHAPE = TileShape(128, 128, 8, 3, 1, 168)
# Heads of 256, in prompts and nodes: buffers for two tiles of 64 keys are beside the queries.
WIDE_SHAPE = TileShape(128, 64, 8, 2, 1, 168)
# Heads of 512: both warpgroups have the same rows, and each of them half of the dimensions of values.
WIDEST_SHAPE = TileShape(64, 32, 8, 2, 1, 168)
WIDE_SHAPES = MappingProxyType({256: WIDE_SHAPE, 512: WIDEST_SHAPE})

# Short prompts: one warpgroup and one fetching warp, two such programs on an SM.
SHORT_SHAPE = TileShape(64, 64, 4, 3, 2, 128)

# While sequences decode, one warpgroup and the leaves (the sequences' own keys) share an SM. Each quarter of
# the SM has 512 registers a lane, and two warps of the warpgroup's program use 272. A second such program
# does not fit, so it cannot keep the leaves out. The other 240 serve one warp of leaves, or two with many
# sequences.
BESIDE_SHAPE = TileShape(64, 64, 4, 2, 1, 136)
FEW_LEAVES_SHAPE = TileShape(16, 32, 1, 2, 4, 240)
LEAF_SHAPE = TileShape(16, 16, 1, 2, 8, 120)

# Prompts that give a program at most this many turns are faster in tiles of fewer keys.
_TURNS_OF_FEW_KEYS = 2


def is_short(device: torch.device, group: int, num_rows: int) -> bool:
    """Say whether prompts are best tiled by SHORT_SHAPE: each unit then finds an SM of its own.

    Args:
        device: where the kernel runs.
        group: query heads per kv head.
        num_rows: query tokens times heads. Units are not counted, because a captured step has room for many
            sequences, most of which are empty.
    """
    return group <= SHORT_SHAPE.rows and num_rows <= num_multiprocessors(device) * SHORT_SHAPE.rows


def attended_tile(device: torch.device, tile: TileShape, num_rows: int, leaves_begin_at: int) -> TileShape:
    """Return how the kernel attends prompts; little work must not wait for much code to load.

    Args:
        device, num_rows: as for is_short.
        tile: how they are cut into units.
        leaves_begin_at: see PrefillWork.
    """
    if tile in (SHORT_SHAPE, *WIDE_SHAPES.values()):
        return tile
    is_little = num_rows <= _TURNS_OF_FEW_KEYS * num_multiprocessors(device) * PROMPT_SHAPE.rows
    # Keys before a unit's first one are not masked, so a tile must begin there.
    return NODE_SHAPE if is_little or leaves_begin_at % PROMPT_SHAPE.keys != 0 else PROMPT_SHAPE


@cache
def unsupported_reason(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, block_size: int
) -> str | None:
    if nvidia_generation(device) != 9:
        return f"it is written for Hopper GPUs (compute capability 9), not for {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its tensor-core products are of bfloat16 and float16, not {dtype}"
    if head_dim not in (64, 128, *WIDE_SHAPES):
        return f"it is written for head dimensions 64, 128, 256 and 512, not {head_dim}"
    if block_size % 16 != 0:
        return f"TMA copies at least 16 keys at a time: block_size must be a multiple, not {block_size}"
    return None
