"""Probe: persistent programs stream tiles of rows of the weight; x stays in registers or shared memory."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.linear.grouped.unpack import unpack
from octavo.layers.triton.activation import activate


class Shape(NamedTuple):
    group: int
    size: int
    rows: int  # 1, 8, 16
    columns: int
    warps: int
    stages: int
    turns: int  # spans of a warp per tile
    parts: int
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    overlap: bool
    mode: int  # 0 all, 1 copies only, 2 no copies
    in_registers: bool


class _Copies(NamedTuple):
    words_at: Any
    pairs_at: Any
    span: Any
    group: Any
    words: Any
    pairs: Any


@gluon.jit
def _plan_copies(
    words_ptr, pairs_ptr, num_columns, num_weight_rows, first_span, shape: gl.constexpr, own: gl.constexpr
):
    PLACES: gl.constexpr = 256 // shape.group * shape.warps
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [shape.warps, 1, 1], [2, 1, 0])
    COPY_PAIRS: gl.constexpr = gl.BlockedLayout(
        [1, 1],
        [1 if shape.columns > 32 else 32 // shape.columns, 32 if shape.columns > 32 else shape.columns],
        [shape.warps, 1],
        [1, 0],
    )
    NUM_SPANS: gl.constexpr = (shape.size + 255) // 256
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    index = gl.arange(0, shape.columns, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    place = gl.arange(0, PLACES, gl.SliceLayout(1, COPY_PAIRS))[:, None]
    index_p = gl.arange(0, shape.columns, gl.SliceLayout(0, COPY_PAIRS))[None, :]
    words = gl.allocate_shared_memory(
        gl.int32, [shape.stages, shape.warps, shape.columns, 32], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    pairs = gl.allocate_shared_memory(
        gl.int32, [shape.stages, PLACES, shape.columns], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    weight_row = index % own + index // own * num_columns
    words_at = words_ptr + (weight_row * (NUM_SPANS * 32) + word)
    pairs_at = pairs_ptr + (index_p % own + index_p // own * num_columns)
    span = first_span + warp
    group = first_span * (256 // shape.group) + place
    if (NUM_SPANS % shape.warps) == 0:
        words_at += span * 32
        pairs_at += group * num_weight_rows
    return _Copies(words_at, pairs_at, span, group, words, pairs)


@gluon.jit
def _copy_step(
    copies, step, first, num_columns, num_weight_rows, num_steps, shape: gl.constexpr, own: gl.constexpr
):
    """Copy each warp's span of a step, turns of a tile one after the other."""
    GROUPS: gl.constexpr = 256 // shape.group
    NUM_SPANS: gl.constexpr = (shape.size + 255) // 256
    stage = step % shape.stages
    tile, turn = step // shape.turns, step % shape.turns
    begin = gl.minimum(first + tile * own, num_columns - own)
    words_at = copies.words_at + begin * (NUM_SPANS * 32)
    pairs_at = copies.pairs_at + begin
    if (NUM_SPANS % shape.warps) == 0:
        words_at += turn * (shape.warps * 32)
        pairs_at += turn * (shape.warps * GROUPS) * num_weight_rows
    else:
        words_at += gl.minimum(copies.span + turn * shape.warps, NUM_SPANS - 1) * 32
        pairs_at += (
            gl.minimum(copies.group + turn * (shape.warps * GROUPS), NUM_SPANS * GROUPS - 1) * num_weight_rows
        )
    async_copy.async_copy_global_to_shared(
        copies.words.index(stage), words_at, mask=copies.span * 0 + step < num_steps
    )
    async_copy.async_copy_global_to_shared(
        copies.pairs.index(stage), pairs_at, mask=copies.group * 0 + step < num_steps
    )
    async_copy.commit_group()


@gluon.jit
def _keep_row(x_ptr, norm_weight_ptr, eps, shape: gl.constexpr):
    """Keep a row of x, normed if asked, and the sums of its groups, in shared memory."""
    TURN: gl.constexpr = 256 * shape.warps
    PLACES: gl.constexpr = TURN // shape.group
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    row = gl.allocate_shared_memory(
        dtype, [shape.turns, shape.warps, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    flat = row._reinterpret(dtype, [shape.turns, TURN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    totals = gl.allocate_shared_memory(
        gl.float32, [shape.turns, PLACES], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    TILE: gl.constexpr = gl.BlockedLayout([8], [32], [shape.warps], [0])
    k = gl.arange(0, TURN, TILE)
    xs = ()
    norms = ()
    squares = gl.zeros([TURN], gl.float32, TILE)
    for turn in gl.static_range(shape.turns):
        at = k + turn * TURN
        x = gl.load(x_ptr + at, mask=at < shape.size, other=0.0)
        xs = xs + (x,)
        if shape.norm:
            norms = norms + (gl.load(norm_weight_ptr + at, mask=at < shape.size, other=0.0),)
    if shape.norm:
        for turn in gl.static_range(shape.turns):
            squares += xs[turn].to(gl.float32) * xs[turn].to(gl.float32)
        scale = gl.rsqrt(gl.sum(squares, 0) / shape.size + eps)
    for turn in gl.static_range(shape.turns):
        x = xs[turn]
        if shape.norm:
            x = (x.to(gl.float32) * scale * norms[turn].to(gl.float32)).to(dtype)
        flat.index(turn).store(x)
        totals.index(turn).store(gl.sum(x.to(gl.float32).reshape([PLACES, shape.group]), 1))
    return row, totals._reinterpret(
        gl.float32, [shape.turns, shape.warps, 256 // shape.group], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def _take_row(row, sums, shape: gl.constexpr, SUMS: gl.constexpr):
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    planes = ()
    totals = ()
    for turn in gl.static_range(shape.turns):
        for plane in gl.static_range(8):
            x = row.index(turn).slice(plane * 32, 32, 1).load(gl.SliceLayout(2, B))
            planes = planes + (gl.expand_dims(x, 2).broadcast_to([shape.warps, 32, 8]),)
        for group in gl.static_range(256 // shape.group):
            totals = totals + (
                gl.expand_dims(sums.index(turn).slice(group, 1, 1).load(gl.SliceLayout(2, SUMS)), 2),
            )
    return planes, totals


@gluon.jit
def _load_rows(x_ptr, stride_x, num_rows, first_span, shape: gl.constexpr, SUMS: gl.constexpr):
    """Planes of a program's columns of x as operands, and the sums of their groups."""
    GROUPS: gl.constexpr = 256 // shape.group
    PLANES: gl.constexpr = shape.group // 32
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    x_at = x_ptr + row * stride_x
    planes = ()
    for turn in gl.static_range(shape.turns):
        for plane in gl.static_range(8):
            at = (first_span + turn * shape.warps + warp) * 256 + plane * 32 + k
            planes = planes + (gl.load(x_at + at, mask=(at < shape.size) & (row < num_rows), other=0.0),)
    totals = ()
    for step in gl.static_range(shape.turns * GROUPS):
        total = gl.zeros([shape.warps, 32, shape.rows], gl.float32, B)
        for plane in gl.static_range(PLANES):
            total += planes[step * PLANES + plane].to(gl.float32)
        totals = totals + (gl.expand_dims(gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SUMS)), 1),)
    return planes, totals


@gluon.jit
def _add_span(
    out,
    words,
    of_step,
    planes,
    totals,
    turn,
    first_plane: gl.constexpr,
    shape: gl.constexpr,
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Add a span's products to out; planes and totals: shared memory, or tuples in registers."""
    GROUPS: gl.constexpr = 256 // shape.group
    PLANES: gl.constexpr = shape.group // 32
    ORIGIN: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    numbers = unpack(words.load(A), 4, dtype)
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums = sums + (gl.zeros([shape.warps, shape.columns, ROWS], gl.float32, SUMS),)
    for own in gl.static_range(PLANES):
        added = ()
        for group in gl.static_range(GROUPS):
            if shape.in_registers:
                x = planes[first_plane + group * PLANES + own]
            else:
                x = planes.index(turn).slice((group * PLANES + own) * 32, 32, 1).load(gl.SliceLayout(2, B))
                x = gl.expand_dims(x, 2).broadcast_to([shape.warps, 32, ROWS])
            added = added + (mma_v2(numbers[group * PLANES + own], x, sums[group]),)
        sums = added
    for group in gl.static_range(GROUPS):
        pair = of_step._reinterpret(
            gl.int32, [shape.warps, GROUPS, shape.columns], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        pair = pair.slice(group, 1, 1).permute([0, 2, 1]).load(SUMS)
        scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        if shape.in_registers:
            total = totals[first_plane // PLANES + group]
        else:
            total = gl.expand_dims(totals.index(turn).slice(group, 1, 1).load(gl.SliceLayout(2, SUMS)), 2)
        out = scale * sums[group] + (out + (low - ORIGIN * scale) * total)
    return out


@gluon.jit
def _store_tile(
    out,
    shared,
    bias_ptr,
    out_ptr,
    first,
    num_rows,
    num_columns,
    stride_out,
    stride_part,
    factor,
    shape: gl.constexpr,
    own: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Add up the warps' sums of a tile and store it."""
    RED: gl.constexpr = gl.BlockedLayout(
        [shape.warps, 1, 1], [1, 32 // ROWS, ROWS], [1, shape.warps, 1], [2, 1, 0]
    )
    SUM: gl.constexpr = gl.SliceLayout(0, RED)
    shared.store(out)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUM))[None, :]
    index = gl.arange(0, own, gl.SliceLayout(1, SUM))
    # The last tile begins early, so that it is whole.
    begin = gl.minimum(first, num_columns - own)
    column = (begin + index)[:, None]
    if shape.activation is None:
        result = gl.sum(shared.load(RED), 0) * factor
    else:
        result = gl.sum(shared.slice(0, own, 1).load(RED), 0) * factor
        up = gl.sum(shared.slice(own, own, 1).load(RED), 0) * factor
    if shape.bias:
        result += gl.load(bias_ptr + begin + index).to(gl.float32)[:, None]
    if shape.activation is not None:
        if shape.bias:
            up += gl.load(bias_ptr + num_columns + begin + index).to(gl.float32)[:, None]
        result = activate(result, shape.activation) * up
    stored = (column >= first) & (row < num_rows)
    out_at = out_ptr + gl.program_id(1) * stride_part + row * stride_out + column
    if shape.adds:
        result += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["num_rows", "tiles"])
def stream_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, norm_weight_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, stride_part, tiles, factor, eps,
    shape: gl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / tiles of a program), parts)."""
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    OWN: gl.constexpr = shape.columns // HALVES
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [shape.warps, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    if shape.overlap:
        gdc_launch_dependents()
    num_columns = num_weight_rows // HALVES
    first = gl.program_id(0) * OWN * tiles
    first_span = gl.program_id(1) * (shape.warps * shape.turns)
    tiles = gl.minimum(tiles, (num_columns - first + OWN - 1) // OWN)
    num_steps = tiles * shape.turns
    copies = _plan_copies(words_ptr, pairs_ptr, num_columns, num_weight_rows, first_span, shape, OWN)
    shared = gl.allocate_shared_memory(
        gl.float32, [2, shape.warps, shape.columns, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    if shape.mode != 2:
        for begun in gl.static_range(shape.stages - 1):
            _copy_step(copies, begun, first, num_columns, num_weight_rows, num_steps, shape, OWN)
    if shape.overlap:
        gdc_wait()
    if shape.rows == 1:
        planes, totals = _keep_row(x_ptr, norm_weight_ptr, eps, shape)
        if shape.in_registers:
            planes, totals = _take_row(planes, totals, shape, SUMS)
    else:
        planes, totals = _load_rows(x_ptr, stride_x, num_rows, first_span, shape, SUMS)
    for tile in range(0, tiles):
        out = gl.zeros([shape.warps, shape.columns, ROWS], gl.float32, SUMS)
        if not shape.in_registers:
            for turn in range(shape.turns):
                step = tile * shape.turns + turn
                stage = step % shape.stages
                if shape.mode != 2:
                    async_copy.wait_group(shape.stages - 2)
                    _copy_step(
                        copies,
                        step + shape.stages - 1,
                        first,
                        num_columns,
                        num_weight_rows,
                        num_steps,
                        shape,
                        OWN,
                    )
                if shape.mode != 1:
                    out = _add_span(
                        out,
                        copies.words.index(stage),
                        copies.pairs.index(stage),
                        planes,
                        totals,
                        turn,
                        0,
                        shape,
                        dtype,
                        ROWS,
                        SUMS,
                    )
        else:
            for turn in gl.static_range(shape.turns):
                step = tile * shape.turns + turn
                stage = step % shape.stages
                if shape.mode != 2:
                    async_copy.wait_group(shape.stages - 2)
                    _copy_step(
                        copies,
                        step + shape.stages - 1,
                        first,
                        num_columns,
                        num_weight_rows,
                        num_steps,
                        shape,
                        OWN,
                    )
                if shape.mode != 1:
                    out = _add_span(
                        out,
                        copies.words.index(stage),
                        copies.pairs.index(stage),
                        planes,
                        totals,
                        0,
                        turn * 8,
                        shape,
                        dtype,
                        ROWS,
                        SUMS,
                    )
        _store_tile(
            out,
            shared.index(tile % 2),
            bias_ptr,
            out_ptr,
            first + tile * OWN,
            num_rows,
            num_columns,
            stride_out,
            stride_part,
            factor,
            shape,
            OWN,
            ROWS,
        )
    async_copy.wait_group(0)
