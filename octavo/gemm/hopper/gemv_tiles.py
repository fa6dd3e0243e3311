"""What the GEMVs of all forms of weights share: the order of tiles, and the epilogue of a tile.

Imported only where Triton runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.kernels.activation import gate_and_up

_ROWS = gl.constexpr(TILE_ROWS)


@gluon.constexpr_function
def ceil_div(a, b):
    return -(-a // b)


@gluon.jit
def num_tiles(num_columns, num_results, OWN: gl.constexpr):
    """Return how many tiles of OWN columns this program takes, of `num_results` rows of num_columns each."""
    tiles = gl.cdiv(num_columns, OWN) * num_results
    return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def place_tile(tile, num_columns, OWN: gl.constexpr, EXPERTS: gl.constexpr = 1):
    """Return the result row that this program's tile belongs to, and the tile's first column.

    With EXPERTS = 0, a dense weight, the result has a single row.
    """
    index = gl.program_id(0) + tile * gl.num_programs(0)
    number = 0
    if EXPERTS > 0:
        each = gl.cdiv(num_columns, OWN)
        number = index // each
        index -= number * each
    return number, index * OWN


@gluon.jit
def load_epilogue(operands, out, column, num_columns, shape):
    """Return the biases of both halves, () if there are none, and the residual, 0.0 if there is none.

    Args:
        operands: has `bias`, a dense weight's, or None.
        out: the result's row, or the residual that it is added to.
        column: columns of the result.
        num_columns: their number.
        shape: has `halves` and `adds`.
    """
    biases = ()
    old = 0.0
    if operands.bias is not None:
        last = gl.minimum(column, num_columns - 1)
        gate_bias = gl.load(operands.bias + last).to(gl.float32)
        biases = (gate_bias, gate_bias)
        if shape.halves == 2:
            biases = (gate_bias, gl.load(operands.bias + num_columns + last).to(gl.float32))
    if shape.adds:
        old = gl.load(out + column, mask=column < num_columns, other=0.0).to(gl.float32)
    return biases, old


@gluon.jit
def store_tile(parts, scale, biases, old, after, out, column, inside, shape, OUT: gl.constexpr):
    """Add up the warps' sums of a tile, apply the epilogue, and store the results.

    Args:
        parts: [W, rows] in shared memory.
        scale: factors of each half's sums.
        biases, old: see load_epilogue.
        after: factor of all sums.
        out: the result's row.
        column: columns of the result, of layout OUT.
        inside: which columns exist.
        shape: has `halves`, `activation` and `adds`.
        OUT: layout of column.
    """
    result = _add_warps(parts, 0, scale, biases, after, shape, OUT)
    if shape.activation is not None:
        up = _add_warps(parts, 1, scale, biases, after, shape, OUT)
        result = gate_and_up(result, up, shape.activation)
    if shape.adds:
        result += old
    gl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _add_warps(parts, HALF: gl.constexpr, scale, biases, after, shape, OUT: gl.constexpr):
    """Return the results of one half of a tile."""
    OWN: gl.constexpr = _ROWS // shape.halves
    result = gl.sum(parts.slice(HALF * OWN, OWN, 1).load(OUT.parent), 0) * after * scale[HALF]
    if len(biases) > 0:
        result += biases[HALF]
    return result
