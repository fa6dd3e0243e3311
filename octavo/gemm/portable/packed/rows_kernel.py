"""The kernel of few_linear: programs that stream tiles of a packed weight through their tensor cores.

    start    copies of the first steps to shared memory
             wait for the previous kernel; then the rows of x (row_digits)
    tile     warp w: spans w, w + W, ...    copied some steps ahead, across tiles (row_copies)
               planes of integers           bits become floats without arithmetic: q + ORIGIN
               sums += integers * x,        for each group, then scaled:
                                            scale * (sums - ORIGIN * total) + min * total
             the warps' sums are added up, epilogue, store

A tile of 32 words of a row, in the layout of a tensor core's operand, gives each thread eight neighbours: two
reads of 16 bytes. Their planes meet eight neighbours of x, another such read. So nothing moves between
threads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.portable.packed.row_copies import Work, copy_step, plan_copies, tile_begin
from octavo.gemm.portable.packed.row_digits import (
    half_of,
    keep_row,
    load_rows,
    read_plane,
    read_total,
    take_row,
)
from octavo.gemm.portable.packed.unpack_words import unpack
from octavo.kernels.activation import activate


class Shape(NamedTuple):
    """Form of the weight, tiling and what is fused, all constants of the kernel.

    Attributes:
        bits: 4 or 8.
        group: columns of a group.
        size: K.
        rows: rows of x, 1, 8 or 16.
        columns: rows of the weight per tile, 16 or 32.
        warps: warps that share K.
        stages: steps in shared memory.
        turns: spans of each row of the weight that a warp has.
        in_registers: whether x is in registers; a single row may be in shared memory instead.
        norm: whether x, then a single row, is normed.
        bias: whether a bias is added.
        activation: its name, or None.
        adds: whether the result is added to the residual.
        overlap: whether the next kernel may start early.
    """

    bits: int
    group: int
    size: int
    rows: int
    columns: int
    warps: int
    stages: int
    turns: int
    in_registers: bool
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    overlap: bool


@gluon.jit
def _add_span(
    out, copies, stage, rows, turn, before: gl.constexpr, shape: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Add the products of each warp's span to out; before: turns before this one, if x is in registers."""
    GROUPS: gl.constexpr = 1024 // shape.bits // shape.group
    PLANES: gl.constexpr = 32 // shape.bits
    EACH: gl.constexpr = (shape.group + 31) // 32
    ROWS: gl.constexpr = out.shape[2]
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    BY_WARP: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    dtype: gl.constexpr = rows.planes[0].dtype if shape.in_registers else rows.planes.dtype
    ORIGIN: gl.constexpr = 0 if shape.bits == 8 else 128 if dtype == gl.bfloat16 else 1024
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    numbers = unpack(copies.words.index(stage).load(A), shape.bits, dtype)
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums = sums + (gl.zeros([shape.warps, shape.columns, ROWS], gl.float32, SUMS),)  # noqa: RUF005
    # Groups take turns: a product waits for the previous one with the same sum.
    for index in gl.static_range(EACH):
        added = ()
        for group in gl.static_range(GROUPS):
            if shape.in_registers:
                x = rows.planes[before * PLANES + group * PLANES // GROUPS + index]
            else:
                x = read_plane(rows, turn, group * PLANES // GROUPS + index, shape, SUMS)
            x = half_of(x, group, k, shape)
            added = added + (mma_v2(numbers[group * PLANES // GROUPS + index], x, sums[group]),)  # noqa: RUF005
        sums = added
    pairs = copies.pairs.index(stage)._reinterpret(gl.int32, [shape.warps, GROUPS, shape.columns], BY_WARP)
    for group in gl.static_range(GROUPS):
        pair = pairs.slice(group, 1, 1).permute([0, 2, 1]).load(SUMS)
        scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        if shape.in_registers:
            total = rows.totals[before * GROUPS + group]
        else:
            total = read_total(rows, turn, group, SUMS)
        out = scale * sums[group] + (out + (low - ORIGIN * scale) * total)
    return out


@gluon.jit
def _store_tile(out, shared, result, work, tile, num_rows, shape: gl.constexpr, own: gl.constexpr):
    """Add up the warps' sums of a tile, apply the epilogue and store."""
    ROWS: gl.constexpr = out.shape[2]
    READ: gl.constexpr = gl.BlockedLayout(
        [shape.warps, 1, 1], [1, 32 // ROWS, ROWS], [1, shape.warps, 1], [2, 1, 0]
    )
    OUT: gl.constexpr = gl.SliceLayout(0, READ)
    shared.store(out)
    begin = tile_begin(work, tile, own)
    column = begin + gl.arange(0, own, gl.SliceLayout(1, OUT))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :]
    known = gl.minimum(column, work.num_columns - 1)
    sums = gl.sum(shared.slice(0, own, 1).load(READ), 0) * result.factor
    if shape.bias:
        sums += gl.load(result.bias + known).to(gl.float32)
    if shape.activation is not None:
        up = gl.sum(shared.slice(own, own, 1).load(READ), 0) * result.factor
        if shape.bias:
            up += gl.load(result.bias + work.num_columns + known).to(gl.float32)
        sums = activate(sums, shape.activation) * up
    is_own = (column >= work.first + tile * own) & (column < work.num_columns)
    stored = is_own & (row < num_rows)
    out_at = result.out + gl.program_id(1).to(gl.int64) * result.stride_part
    out_at += row.to(gl.int64) * result.stride + column
    if shape.adds:
        sums += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, sums.to(result.out.dtype.element_ty), mask=stored)


@gluon.jit
def _step(
    out, copies, rows, tile, turn, before: gl.constexpr, work,
    shape: gl.constexpr, own: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Wait for a step, start a later one, and add the products."""
    step = tile * shape.turns + turn
    async_copy.wait_group(shape.stages - 2)
    copy_step(copies, step + shape.stages - 1, work, shape, own)
    return _add_span(out, copies, step % shape.stages, rows, turn, before, shape, SUMS)


@gluon.jit(do_not_specialize=["num_rows", "tiles"])
def few_linear_kernel(
    x_ptr, words_ptr, pairs_ptr, norm_weight_ptr, result,
    num_rows, num_weight_rows, stride_x, tiles, eps, shape: gl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / those of `tiles` tiles), parts of K).

    With an activation, the first half of a tile's columns is gate, the other one up.
    """
    # Tensor cores multiply 8 rows at least; a single one is repeated.
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    OWN: gl.constexpr = shape.columns // HALVES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [shape.warps, 1, 1], [1, 16, 8])
    if shape.overlap:
        gdc_launch_dependents()
    num_columns = num_weight_rows // HALVES
    first = gl.program_id(0) * (OWN * tiles)
    tiles = gl.minimum(tiles, (num_columns - first + OWN - 1) // OWN)
    first_span = gl.program_id(1) * (shape.warps * shape.turns)
    work = Work(first, num_columns, num_weight_rows, first_span, tiles * shape.turns)
    copies = plan_copies(words_ptr, pairs_ptr, work, shape, OWN)
    shared = gl.allocate_shared_memory(
        gl.float32, [shape.warps, shape.columns, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    for begun in gl.static_range(shape.stages - 1):
        copy_step(copies, begun, work, shape, OWN)
    if shape.overlap:
        gdc_wait()
    if shape.rows == 1:
        rows = keep_row(x_ptr, norm_weight_ptr, eps, shape)
        if shape.in_registers:
            rows = take_row(rows, shape, SUMS)
    else:
        rows = load_rows(x_ptr, stride_x, num_rows, first_span, shape, SUMS)
    for tile in range(tiles):
        out = gl.zeros([shape.warps, shape.columns, ROWS], gl.float32, SUMS)
        if shape.in_registers:
            for turn in gl.static_range(shape.turns):
                out = _step(out, copies, rows, tile, turn, turn, work, shape, OWN, SUMS)
        else:
            for turn in range(shape.turns):
                out = _step(out, copies, rows, tile, turn, 0, work, shape, OWN, SUMS)
        _store_tile(out, shared, result, work, tile, num_rows, shape, OWN)
    async_copy.wait_group(0)
