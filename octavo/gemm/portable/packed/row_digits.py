"""The rows of x that few_linear multiplies: operands of tensor cores, and the sum of each group of columns.

Each warp keeps its own columns in registers. A single row is normed in shared memory first, and stays there
if it is too long for registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PLANE = gl.constexpr(32)


class Rows(NamedTuple):
    """A program's columns of x; W warps, G groups a span.

    Attributes:
        planes: a tuple of operands [W, 32, rows], the planes of all turns; or of a single row, [turns, W,
            columns of a span] in shared memory.
        totals: sums of groups in float32, a tuple of [W, 1, rows] (of a single row [W, 1, 1]), the groups of
            all turns; or [turns, W, G] in shared memory.
    """

    planes: Any
    totals: Any


@gluon.jit
def _norm_scale(xs, eps, shape: gl.constexpr):
    squares = xs[0].to(gl.float32) * xs[0].to(gl.float32)
    for turn in gl.static_range(1, shape.turns):
        squares += xs[turn].to(gl.float32) * xs[turn].to(gl.float32)
    return gl.rsqrt(gl.sum(squares, 0) / shape.size + eps)


@gluon.jit
def keep_row(x_ptr, norm_weight_ptr, eps, shape: gl.constexpr):
    """Keep a single row, normed if shape.norm, and its sums in shared memory; zeros follow."""
    SPAN: gl.constexpr = 1024 // shape.bits
    TURN: gl.constexpr = SPAN * shape.warps
    GROUPS: gl.constexpr = TURN // shape.group
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BY_WARP: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    planes = gl.allocate_shared_memory(dtype, [shape.turns, TURN], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [shape.turns, GROUPS], FLAT)
    k = gl.arange(0, TURN, gl.BlockedLayout([8], [32], [shape.warps], [0]))
    xs = ()
    norms = ()
    # All loads are in flight before the first one is used.
    for turn in gl.static_range(shape.turns):
        at = k + turn * TURN
        xs = xs + (gl.load(x_ptr + at, mask=at < shape.size, other=0.0),)  # noqa: RUF005
        if shape.norm:
            norms = norms + (gl.load(norm_weight_ptr + at, mask=at < shape.size, other=0.0),)  # noqa: RUF005
    if shape.norm:
        scale = _norm_scale(xs, eps, shape)
    for turn in gl.static_range(shape.turns):
        x = xs[turn]
        if shape.norm:
            x = (x.to(gl.float32) * scale * norms[turn].to(gl.float32)).to(dtype)
        planes.index(turn).store(x)
        totals.index(turn).store(gl.sum(x.to(gl.float32).reshape([GROUPS, shape.group]), 1))
    return Rows(
        planes._reinterpret(dtype, [shape.turns, shape.warps, SPAN], BY_WARP),
        totals._reinterpret(gl.float32, [shape.turns, shape.warps, SPAN // shape.group], BY_WARP),
    )


@gluon.jit
def load_rows(x_ptr, stride_x, num_rows, first_span, shape: gl.constexpr, SUMS: gl.constexpr):
    """Load a program's columns of all rows, from a span on; past the ends there are zeros."""
    SPAN: gl.constexpr = 1024 // shape.bits
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, _PLANE, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    x_at = x_ptr + row.to(gl.int64) * stride_x
    planes = ()
    totals = ()
    for turn in gl.static_range(shape.turns):
        first = (first_span + turn * shape.warps + warp) * SPAN + k
        for plane in gl.static_range(SPAN // _PLANE):
            at = first + plane * _PLANE
            x = gl.load(x_at + at, mask=(at < shape.size) & (row < num_rows), other=0.0)
            planes = planes + (x,)  # noqa: RUF005
    for group in gl.static_range(shape.turns * (SPAN // shape.group)):
        total = gl.zeros([shape.warps, _PLANE, shape.rows], gl.float32, B)
        for plane in gl.static_range(
            group * shape.group // _PLANE, ((group + 1) * shape.group + _PLANE - 1) // _PLANE
        ):
            total += half_of(planes[plane], group, k, shape).to(gl.float32)
        of_row = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SUMS))
        totals = totals + (gl.expand_dims(of_row, 1),)  # noqa: RUF005
    return Rows(planes, totals)


@gluon.jit
def half_of(x, group: gl.constexpr, k, shape: gl.constexpr):
    """Return a plane of x; where a group is half a plane, all but the columns of that half are zero."""
    if shape.group < _PLANE:
        return gl.where(k // shape.group == group % (_PLANE // shape.group), x, 0.0)
    else:
        return x


@gluon.jit
def read_plane(row, turn, plane: gl.constexpr, shape: gl.constexpr, SUMS: gl.constexpr):
    """Return a plane of a single row that is in shared memory, repeated: [W, 32, 8]."""
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    x = row.planes.index(turn).slice(plane * _PLANE, _PLANE, 1).load(gl.SliceLayout(2, B))
    return gl.expand_dims(x, 2).broadcast_to([shape.warps, _PLANE, 8])


@gluon.jit
def read_total(row, turn, group: gl.constexpr, SUMS: gl.constexpr):
    """Return a group's sums of a single row that is in shared memory, [W, 1, 1]."""
    return gl.expand_dims(row.totals.index(turn).slice(group, 1, 1).load(gl.SliceLayout(2, SUMS)), 2)


@gluon.jit
def take_row(row, shape: gl.constexpr, SUMS: gl.constexpr):
    """Return a single row that is in shared memory in registers."""
    planes = ()
    totals = ()
    for turn in gl.static_range(shape.turns):
        for plane in gl.static_range(32 // shape.bits):
            planes = planes + (read_plane(row, turn, plane, shape, SUMS),)  # noqa: RUF005
        for group in gl.static_range(1024 // shape.bits // shape.group):
            totals = totals + (read_total(row, turn, group, SUMS),)  # noqa: RUF005
    return Rows(planes, totals)
