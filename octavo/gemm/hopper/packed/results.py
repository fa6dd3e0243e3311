"""Where sums belong: rows of the weight, the epilogue, and the result.

Sums are transposed: rows of the weight, then rows of x. A tile has 128 of the weight; with an activation, of
every 16 the first 8 are gate's, the others the same columns of up, so that both of a column are one thread's.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.forms.packed import TILE
from octavo.kernels.activation import activate

_TILE = gl.constexpr(TILE)


class Work(NamedTuple):
    """What programs multiply.

    Attributes:
        num_rows: M.
        num_columns: of the result.
        num_spans: of a row of the weight.
        num_units: spans of all stripes.
        num_groups: of rows of x; stripes of the same rows of the weight are neighbours.
    """

    num_rows: Any
    num_columns: Any
    num_spans: Any
    num_units: Any
    num_groups: Any


@gluon.jit
def weight_rows(tile, index, num_columns, shape):
    """Return the weight's rows of a tile: with an activation 8 of gate, then 8 of up, by turns."""
    if shape.activation is None:
        return gl.minimum(tile * _TILE + index, num_columns - 1)
    else:
        column = tile * (_TILE // 2) + index // 16 * 8 + index % 8
        return gl.minimum(column, num_columns - 1) + index // 8 % 2 * num_columns


@gluon.jit
def finish(sums, tile, row, result, work, shape, SUMS: gl.constexpr):
    """Apply the epilogue to a tile's sums for the rows of x from `row` on, and store the results."""
    sums *= result.factor
    if result.bias is not None:
        index = gl.arange(0, _TILE, gl.SliceLayout(1, SUMS))
        weight_row = weight_rows(tile, index, work.num_columns, shape)
        sums += gl.load(result.bias + weight_row).to(gl.float32)[:, None]
    if shape.activation is None:
        _store(sums, tile * _TILE, row, result, work, shape, SUMS)
    else:
        # Gate and up of a column are the same thread's.
        HALF: gl.constexpr = half_layout(shape.rows)
        gate, up = sums.reshape([_TILE // 16, 2, 8, shape.rows]).permute([0, 2, 3, 1]).split()
        out = (activate(gate, shape.activation) * up).reshape([_TILE // 2, shape.rows])
        out = gl.convert_layout(out, HALF, assert_trivial=True)
        _store(out, tile * (_TILE // 2), row, result, work, shape, HALF)


@gluon.constexpr_function
def half_layout(rows):
    """Return the layout that sums have when gate and up have become one: 8 columns of each warp's 16."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 8 << i] for i in range((rows // 8).bit_length() - 1))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, rows],
    )


@gluon.jit
def _store(sums, first, row, result, work, shape, LAYOUT: gl.constexpr):
    """Store [columns, rows] as rows of the result, added to what is there if asked for."""
    column = first + gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    row += gl.arange(0, shape.rows, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (column < work.num_columns) & (row < work.num_rows)
    out_at = result.out + row.to(gl.int64) * result.stride + column
    if shape.adds:
        sums += gl.load(out_at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_at, sums.to(result.out.dtype.element_ty), mask=inside)
