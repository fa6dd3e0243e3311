"""The persistent GEMM of float8 rows: its constants, the order of its tiles, and its epilogue."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.float8.many_tiling import HALF_ROWS, TILE_ROWS
from octavo.kernels.activation import activate

_HALF = gl.constexpr(HALF_ROWS)
_ROWS = gl.constexpr(TILE_ROWS)
# x / (1 + exp(-x)) by approximate instructions: a quarter as many as the exact ones.
_SILU = gl.constexpr(
    """{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
    add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }"""
)


class Shape(NamedTuple):
    """Tiling and epilogue, all constants of the kernel.

    Attributes:
        halves: 2 with an activation, which needs a column of gate and one of up, else 1.
        columns: columns of the result in a tile's first part.
        extra: columns in its second part, or 0.
        stages: steps in shared memory.
        span: steps whose products tensor cores sum; 1 if tiled.
        tiled: whether 128 x 128 numbers of the weight share a scale; False: each row has one.
        group: vertically adjacent tiles that programs take in succession.
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
    """The result, whose row r is at out + r * stride, and the operands of its epilogue.

    Attributes:
        out: pointer.
        stride: between rows.
        row_scales: one for each row of x.
        scales: one for each row of the weight, or for each of its tiles, [tiles along N, spans].
        bias: one for each row of the weight, or None.
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

    Tiles run down a group, then to the group on its right: programs that run at the same time share rows and
    weights.
    """
    down = gl.cdiv(work.num_rows, _ROWS)
    across = gl.cdiv(work.num_columns, shape.columns + shape.extra)
    first = tile // (shape.group * across) * shape.group
    within = tile - first * across
    height = gl.minimum(down - first, shape.group)
    return (first + within % height) * _ROWS, within // height * (shape.columns + shape.extra)


@gluon.constexpr_function
def sums_layout(width):
    """Return the layout of a warpgroup's sums, [64, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


@gluon.jit
def prepare(result, first_row, first_column, COLUMNS: gl.constexpr, work, shape):
    """Load the operands of a part's epilogue.

    Args:
        result: see Result.
        first_row: the warpgroup's first row.
        first_column: the part's first column.
        COLUMNS: columns of the part.
        work, shape: see there.

    Returns:
        Scales of rows of x, of the weight's rows (or gate's), of up's, and the residual; placeholders stand
        for the last two where there are none.
    """
    OUT: gl.constexpr = sums_layout(COLUMNS)
    SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    scale = gl.full([COLUMNS], 1.0, gl.float32, SCALES)
    up_scale = scale
    if not shape.tiled:
        index = gl.minimum(first_column + gl.arange(0, COLUMNS, SCALES), work.num_columns - 1)
        scale = gl.load(result.scales + index)
        if shape.halves == 2:
            up_scale = gl.load(result.scales + work.num_columns + index)
    row = first_row + gl.arange(0, _HALF, gl.SliceLayout(1, OUT))
    row_scale = gl.load(result.row_scales + row, mask=row < work.num_rows, other=0.0)
    old = row_scale
    if shape.adds:
        column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
        inside = (row < work.num_rows)[:, None] & (column < work.num_columns)[None, :]
        old_at = result.out + row.to(gl.int64)[:, None] * result.stride + column[None, :]
        old = gl.load(old_at, mask=inside, other=0.0)
    return row_scale, scale, up_scale, old


@gluon.jit
def finish(sums, part, staged, result, first_column, work, shape):
    """Apply the epilogue to a part's sums and write the results to shared memory.

    Args:
        sums: [64, rows of the weight].
        part: see prepare.
        staged: [64, columns] in shared memory.
        result: see Result.
        first_column: the part's first column.
        work, shape: see there.
    """
    COLUMNS: gl.constexpr = staged.shape[1]
    OUT: gl.constexpr = sums_layout(COLUMNS)
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    column = gl.minimum(column, work.num_columns - 1)
    row_scale, scale, up_scale, old = part
    row_scale = row_scale[:, None]
    scale = row_scale * gl.convert_layout(scale, gl.SliceLayout(0, OUT))[None, :]
    if shape.halves == 2:
        gate, up = sums.reshape([_HALF, 2, COLUMNS]).permute([0, 2, 1]).split()
        gate = gl.convert_layout(gate, OUT, assert_trivial=True) * scale
        up_scale = row_scale * gl.convert_layout(up_scale, gl.SliceLayout(0, OUT))[None, :]
        up = gl.convert_layout(up, OUT, assert_trivial=True) * up_scale
        if result.bias is not None:
            gate += gl.load(result.bias + column).to(gl.float32)[None, :]
            up += gl.load(result.bias + work.num_columns + column).to(gl.float32)[None, :]
        sums = _activate(gate, shape.activation) * up
    else:
        sums *= scale
        if result.bias is not None:
            sums += gl.load(result.bias + column).to(gl.float32)[None, :]
    if shape.adds:
        sums += old.to(gl.float32)
    staged.store(sums.to(staged.dtype))


@gluon.jit
def _activate(gate, NAME: gl.constexpr):
    if NAME == "silu":
        return gl.inline_asm_elementwise(_SILU, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return activate(gate, NAME)
