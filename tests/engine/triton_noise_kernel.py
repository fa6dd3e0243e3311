"""A kernel that writes the sampler's noise down, for oracles."""

import triton
import triton.language as tl

from octavo.engine.sampling.triton_random import TILE_STREAM, TOKEN_STREAM, gumbel

BLOCK = 2048


@triton.jit
def noise_kernel(out_ptr, seeds_ptr, position, OF_TILES: tl.constexpr, SIZE: tl.constexpr):
    """Grid: (rows, blocks). Writes [rows, blocks * SIZE]."""
    row = tl.program_id(0)
    index = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    seed = tl.load(seeds_ptr + row)
    if OF_TILES:
        noise = gumbel(seed, position, index, TILE_STREAM)
    else:
        noise = gumbel(seed, position, index, TOKEN_STREAM)
    tl.store(out_ptr + row * tl.num_programs(1) * SIZE + index, noise)
