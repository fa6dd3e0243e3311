"""The epilogue of many_linear: scales, bias, activation, residual."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.float8.many_tiling import HALF_ROWS
from octavo.kernels.activation import activate

_HALF = gl.constexpr(HALF_ROWS)
# x / (1 + exp(-x)) by approximate instructions, a quarter as many as exact ones.
_SILU = gl.constexpr(
    """{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
    add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }"""
)


@gluon.constexpr_function
def sums_layout(width):
    """Return the layout of a warpgroup's sums, [64, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


@gluon.jit
def prepare(result, first_row, first_column, COLUMNS: gl.constexpr, work, shape):
    """Load what the epilogue of a part reads.

    Args:
        result: see tiles.
        first_row: of a warpgroup.
        first_column: of the part.
        COLUMNS: of the part.
        work, shape: see tiles.

    Returns:
        Scales of rows of x, of the weight's rows (gate), of those of up, and the residual; the last two only
        where there are any.
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
        part: what prepare returned.
        staged: [64, columns] in shared memory.
        result: see tiles.
        first_column: of the part.
        work, shape: see tiles.
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
