"""How the programs of a GEMV of experts share out tiles; imported only where Triton runs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def num_expert_tiles(num_columns, num_results, OWN: gl.constexpr):
    """Return how many tiles of OWN columns this program takes of so many results of num_columns each."""
    tiles = gl.cdiv(num_columns, OWN) * num_results
    return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def place_tile(tile, num_columns, OWN: gl.constexpr):
    """Return which result this program's tile is of, and its first column."""
    index = gl.program_id(0) + tile * gl.num_programs(0)
    each = gl.cdiv(num_columns, OWN)
    number = index // each
    return number, (index - number * each) * OWN
