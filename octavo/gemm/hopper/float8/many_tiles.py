"""What the kernel of many_linear knows of its work, and where its tiles lie."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.float8.many_tiling import TILE_ROWS

_ROWS = gl.constexpr(TILE_ROWS)


class Shape(NamedTuple):
    """Tiling and epilogue, all constants of the kernel.

    Attributes:
        halves: 2 with an activation, which needs a column of gate and one of up, else 1.
        columns: of the result in a tile's first part.
        extra: in its second part, or 0.
        stages: steps in shared memory.
        span: steps whose products tensor cores add up.
        tiled: whether a scale is for 128 x 128 numbers of the weight, else for a row; then span is 1.
        group: tiles below one another that follow one another.
        activation: name or None.
        adds: whether the result is added to the residual.
    """

    halves: Any
    columns: Any
    extra: Any
    stages: Any
    span: Any
    tiled: Any
    group: Any
    activation: Any
    adds: Any


class Work(NamedTuple):
    """Rows of x, columns of the result, spans of K."""

    num_rows: Any
    num_columns: Any
    num_spans: Any


class Result(NamedTuple):
    """The result in memory, row r at out + r * stride, and pointers to what it is made with.

    Attributes:
        out: pointer.
        stride: between rows.
        row_scales: one for each row of x.
        scales: one for each row of the weight; or of its tiles, [tiles above one another, spans].
        bias: of the weight's rows, or None.
    """

    out: Any
    stride: Any
    row_scales: Any
    scales: Any
    bias: Any


@gluon.jit
def num_tiles(work, shape):
    """Return how many tiles there are."""
    return gl.cdiv(work.num_rows, _ROWS) * gl.cdiv(work.num_columns, shape.columns + shape.extra)


@gluon.jit
def place(tile, work, shape):
    """Return the first row and the first column of a tile.

    As many tiles as a group has lie below one another, then come those to their right: programs that run at
    the same time share rows and weights.
    """
    down = gl.cdiv(work.num_rows, _ROWS)
    across = gl.cdiv(work.num_columns, shape.columns + shape.extra)
    first = tile // (shape.group * across) * shape.group
    within = tile - first * across
    height = gl.minimum(down - first, shape.group)
    return (first + within % height) * _ROWS, within // height * (shape.columns + shape.extra)
