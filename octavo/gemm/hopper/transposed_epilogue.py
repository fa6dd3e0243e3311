"""The epilogue of GEMMs whose sums are transposed: [rows of the weight, rows of x].

A tile has 128 rows of the weight. With an activation, the first 8 of every 16 rows are gate's, and the others
the same columns of up, so that one thread holds both of a column.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.forms.packed import TILE
from octavo.kernels.activation import gate_and_up

_TILE = gl.constexpr(TILE)


@gluon.jit
def weight_rows(tile, index, num_columns, shape):
    """Return the weight's rows of a tile; with an activation 8 of gate and 8 of up alternate."""
    if shape.activation is None:
        return gl.minimum(tile * _TILE + index, num_columns - 1)
    else:
        column = tile * (_TILE // 2) + index // 16 * 8 + index % 8
        return gl.minimum(column, num_columns - 1) + index // 8 % 2 * num_columns


@gluon.jit
def finish(sums, tile, row, result, work, shape, SUMS: gl.constexpr):
    """Apply a dense product's epilogue to a tile's sums, for rows of x from `row` on; store the results."""
    sums *= result.factor
    if result.bias is not None:
        index = gl.arange(0, _TILE, gl.SliceLayout(1, SUMS))
        weight_row = weight_rows(tile, index, work.num_columns, shape)
        sums += gl.load(result.bias + weight_row).to(gl.float32)[:, None]
    if shape.activation is None:
        _store(sums, tile * _TILE, row, result, work, shape, SUMS)
    else:
        out = _gated(sums, shape)
        _store(out, tile * (_TILE // 2), row, result, work, shape, half_layout(shape.rows))


@gluon.jit
def _gated(sums, shape):
    """Return activation(gate) * up of a tile's sums, [64, rows]."""
    gate, up = sums.reshape([_TILE // 16, 2, 8, shape.rows]).permute([0, 2, 3, 1]).split()
    out = gate_and_up(gate, up, shape.activation).reshape([_TILE // 2, shape.rows])
    # One thread holds both gate and up of a column, so nothing moves.
    return gl.convert_layout(out, half_layout(shape.rows), assert_trivial=True)


@gluon.constexpr_function
def half_layout(rows):
    """Return the layout of sums once gate and up have become one: 8 columns of each warp's 16."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 8 << i] for i in range((rows // 8).bit_length() - 1))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, rows],
    )


@gluon.jit
def _store(sums, first, row, result, work, shape, LAYOUT: gl.constexpr):
    """Store [columns, rows] as rows of the result; with `adds`, add them to the residual there."""
    column = first + gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    row += gl.arange(0, shape.rows, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (column < work.num_columns) & (row < work.num_rows)
    out_at = result.out + row.to(gl.int64) * result.stride + column
    if shape.adds:
        sums += gl.load(out_at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_at, sums.to(result.out.dtype.element_ty), mask=inside)


@gluon.jit
def finish_experts(sums, operands, out, expert, first, end, tile, num_columns, shape, SUMS: gl.constexpr):
    """Apply the epilogue of experts to a tile's sums, and store the results.

    Args:
        sums: [128, rows] float32.
        operands, out, num_columns, shape: see mxfp4_persistent.
        expert, first, end: the tile's expert, its first row of x and the end of the expert's rows.
        tile: the tile's number along the columns.
        SUMS: layout of the sums.
    """
    if operands.bias is not None:
        row = weight_rows(tile, gl.arange(0, _TILE, gl.SliceLayout(1, SUMS)), num_columns, shape)
        HALVES: gl.constexpr = 1 if shape.activation is None else 2
        bias_at = operands.bias + expert.to(gl.int64) * num_columns * HALVES + row
        sums += gl.load(bias_at).to(gl.float32)[:, None]
    if shape.activation is None:
        _store_pairs(sums, operands, out, first, end, tile * _TILE, num_columns, shape)
    else:
        results = _gated(sums, shape)
        _store_pairs(results, operands, out, first, end, tile * (_TILE // 2), num_columns, shape)


@gluon.jit
def _store_pairs(results, operands, out, first, end, first_column, num_columns, shape):
    """Store [columns, rows] as rows of the result; each thread stores eight columns of a row."""
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
