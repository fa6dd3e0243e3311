"""Where sums of a tile of experts belong, and what becomes of them.

Sums are transposed: a tile has 128 rows of the weight. With an activation, a warp's 16 rows are 8 of gate and
the same 8 of up, so that both of a column are one thread's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import TILE
from octavo.gemm.hopper.packed.results import half_layout, weight_rows
from octavo.kernels.activation import gate_and_up

_TILE = gl.constexpr(TILE)


@gluon.jit
def finish(sums, operands, out, expert, first, end, tile, num_columns, shape, SUMS: gl.constexpr):
    """Apply the epilogue to a tile's sums and store the results.

    Args:
        sums: [128, rows] float32.
        operands, out, num_columns, shape: see kernel.
        expert, first, end: of the tile's rows of x.
        tile: of the columns.
        SUMS: layout of the sums.
    """
    if operands.bias is not None:
        row = weight_rows(tile, gl.arange(0, _TILE, gl.SliceLayout(1, SUMS)), num_columns, shape)
        HALVES: gl.constexpr = 1 if shape.activation is None else 2
        bias_at = operands.bias + expert.to(gl.int64) * num_columns * HALVES + row
        sums += gl.load(bias_at).to(gl.float32)[:, None]
    if shape.activation is None:
        _store(sums, operands, out, first, end, tile * _TILE, num_columns, shape)
    else:
        # Gate and up of a column are the same thread's.
        gate, up = sums.reshape([_TILE // 16, 2, 8, shape.rows]).permute([0, 2, 3, 1]).split()
        results = gate_and_up(gate, up, shape.activation).reshape([_TILE // 2, shape.rows])
        results = gl.convert_layout(results, half_layout(shape.rows), assert_trivial=True)
        _store(results, operands, out, first, end, tile * (_TILE // 2), num_columns, shape)


@gluon.jit
def _store(results, operands, out, first, end, first_column, num_columns, shape):
    """Store [columns, rows] as rows of the result, eight columns of a row by each thread."""
    COLUMNS: gl.constexpr = results.shape[0]
    LAYOUT: gl.constexpr = _store_layout(COLUMNS)
    results = gl.convert_layout(results.to(out.dtype.element_ty), LAYOUT)
    row = first + gl.arange(0, shape.rows, gl.SliceLayout(0, LAYOUT))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    is_row = row < end
    if operands.pairs is not None:
        row = gl.load(operands.pairs + row, mask=is_row, other=0)
    out_at = out + row.to(gl.int64)[None, :] * num_columns + column[:, None]
    gl.store(out_at, results, mask=is_row[None, :] & (column < num_columns)[:, None])


@gluon.constexpr_function
def _store_layout(columns):
    """Return a layout of [columns, rows] whose threads have eight neighbouring columns."""
    across = columns // 8
    return gl.BlockedLayout([8, 1], [across, 32 // across], [1, 8], [0, 1])
