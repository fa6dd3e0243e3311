"""Probe: as stream_kernel, words and pairs by a TMA warp."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.linear.grouped.unpack import unpack
from octavo.layers.triton.activation import activate


class Shape(NamedTuple):
    group: int
    size: int
    rows: int  # 1, 8, 16
    each: int  # tiles of 16 rows per step: 1 or 2, gate and up: 2
    warps: int
    stages: int
    turns: int
    parts: int
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    mode: int


class _Pipe(NamedTuple):
    words: Any
    pairs: Any
    filled: Any
    free: Any
    shared: Any
    row: Any
    totals: Any


class Work(NamedTuple):
    x_ptr: Any
    norm_weight_ptr: Any
    bias_ptr: Any
    out_ptr: Any
    num_rows: Any
    num_columns: Any
    stride_x: Any
    stride_out: Any
    stride_part: Any
    tiles: Any
    factor: Any
    eps: Any


@gluon.jit
def _fetch(words_matrix, pairs_matrix, pipe, work, shape):
    GROUPS: gl.constexpr = 256 // shape.group
    OWN: gl.constexpr = 16 if shape.activation is not None else 16 * shape.each
    first = gl.program_id(0) * OWN * work.tiles
    first_span = gl.program_id(1) * (shape.warps * shape.turns)
    count = gl.minimum(work.tiles, (work.num_columns - first + OWN - 1) // OWN) * shape.turns
    for step in range(0, count):
        stage = step % shape.stages
        mbarrier.wait(pipe.free.index(stage), (step // shape.stages + 1) & 1)
        filled = pipe.filled.index(stage)
        mbarrier.expect(
            filled, (words_matrix.block_type.nbytes + pairs_matrix.block_type.nbytes * GROUPS) * shape.each
        )
        tile, turn = step // shape.turns, step % shape.turns
        span = first_span + turn * shape.warps
        for own in gl.static_range(shape.each):
            row = first + tile * OWN + own * (16 if shape.activation is None else work.num_columns)
            tma.async_copy_global_to_shared(
                words_matrix, [span, row, 0], filled, pipe.words.index(stage * shape.each + own)
            )
            for group in gl.static_range(GROUPS):
                buffer = pipe.pairs.index((stage * shape.each + own) * GROUPS + group)
                buffer = buffer._reinterpret(gl.int32, pairs_matrix.block_shape, pairs_matrix.layout)
                tma.async_copy_global_to_shared(pairs_matrix, [group, span, row], filled, buffer)


@gluon.jit
def _keep_row(pipe, work, shape):
    TURN: gl.constexpr = 256 * shape.warps
    PLACES: gl.constexpr = TURN // shape.group
    dtype: gl.constexpr = work.x_ptr.dtype.element_ty
    flat = pipe.row._reinterpret(dtype, [shape.turns, TURN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    totals = pipe.totals._reinterpret(
        gl.float32, [shape.turns, PLACES], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    TILE: gl.constexpr = gl.BlockedLayout([8], [32], [shape.warps], [0])
    k = gl.arange(0, TURN, TILE)
    xs = ()
    norms = ()
    squares = gl.zeros([TURN], gl.float32, TILE)
    for turn in gl.static_range(shape.turns):
        at = k + turn * TURN
        if shape.norm:
            norms = norms + (gl.load(work.norm_weight_ptr + at, mask=at < shape.size, other=0.0),)
    gdc_wait()
    for turn in gl.static_range(shape.turns):
        at = k + turn * TURN
        x = gl.load(work.x_ptr + at, mask=at < shape.size, other=0.0)
        xs = xs + (x,)
    if shape.norm:
        for turn in gl.static_range(shape.turns):
            squares += xs[turn].to(gl.float32) * xs[turn].to(gl.float32)
        scale = gl.rsqrt(gl.sum(squares, 0) / shape.size + work.eps)
    for turn in gl.static_range(shape.turns):
        x = xs[turn]
        if shape.norm:
            x = (x.to(gl.float32) * scale * norms[turn].to(gl.float32)).to(dtype)
        flat.index(turn).store(x)
        totals.index(turn).store(gl.sum(x.to(gl.float32).reshape([PLACES, shape.group]), 1))


@gluon.jit
def _load_rows(work, first_span, shape, SUMS: gl.constexpr):
    GROUPS: gl.constexpr = 256 // shape.group
    PLANES: gl.constexpr = shape.group // 32
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    x_at = work.x_ptr + row * work.stride_x
    planes = ()
    for turn in gl.static_range(shape.turns):
        for plane in gl.static_range(8):
            at = (first_span + turn * shape.warps + warp) * 256 + plane * 32 + k
            planes = planes + (gl.load(x_at + at, mask=(at < shape.size) & (row < work.num_rows), other=0.0),)
    totals = ()
    for step in gl.static_range(shape.turns * GROUPS):
        total = gl.zeros([shape.warps, 32, shape.rows], gl.float32, B)
        for plane in gl.static_range(PLANES):
            total += planes[step * PLANES + plane].to(gl.float32)
        totals = totals + (gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SUMS)),)
    return planes, totals


@gluon.jit
def _add_span(
    out,
    words,
    of_step,
    pipe,
    planes,
    totals,
    turn,
    first_plane: gl.constexpr,
    shape,
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    SUMS: gl.constexpr,
):
    GROUPS: gl.constexpr = 256 // shape.group
    PLANES: gl.constexpr = shape.group // 32
    ORIGIN: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    numbers = unpack(words, 4, dtype)
    for group in gl.static_range(GROUPS):
        sums = gl.zeros([shape.warps, 16, ROWS], gl.float32, SUMS)
        for plane in gl.static_range(group * PLANES, (group + 1) * PLANES):
            if shape.rows == 1:
                x = pipe.row.index(turn).slice(plane * 32, 32, 1).load(gl.SliceLayout(2, B))
                x = gl.expand_dims(x, 2).broadcast_to([shape.warps, 32, ROWS])
            else:
                x = planes[first_plane + plane]
            sums = mma_v2(numbers[plane], x, sums)
        pair = of_step[group]
        scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        if shape.rows == 1:
            total = gl.expand_dims(
                pipe.totals.index(turn).slice(group, 1, 1).load(gl.SliceLayout(2, SUMS)), 2
            )
        else:
            total = gl.expand_dims(totals[first_plane // PLANES + group], 1)
        out = scale * sums + (out + (low - ORIGIN * scale) * total)
    return out


@gluon.jit
def _step(
    outs,
    pipe,
    planes,
    totals,
    step,
    turn,
    first_plane: gl.constexpr,
    shape,
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    SUMS: gl.constexpr,
):
    GROUPS: gl.constexpr = 256 // shape.group
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    stage = step % shape.stages
    mbarrier.wait(pipe.filled.index(stage), (step // shape.stages) & 1)
    words = ()
    pairs = ()
    for own in gl.static_range(shape.each):
        words = words + (pipe.words.index(stage * shape.each + own).load(A),)
        both = ()
        for group in gl.static_range(GROUPS):
            at = (stage * shape.each + own) * GROUPS + group
            both = both + (gl.expand_dims(pipe.pairs.index(at).load(gl.SliceLayout(2, SUMS)), 2),)
        pairs = pairs + (both,)
    mbarrier.arrive(pipe.free.index(stage), count=1)
    results = ()
    for own in gl.static_range(shape.each):
        if shape.mode == 1:
            results = results + (outs[own],)
        else:
            results = results + (
                _add_span(
                    outs[own],
                    words[own],
                    pairs[own],
                    pipe,
                    planes,
                    totals,
                    turn,
                    first_plane,
                    shape,
                    dtype,
                    ROWS,
                    SUMS,
                ),
            )
    return results


@gluon.jit
def _finish(sums, first, work, shape, own: gl.constexpr):
    SUM: gl.constexpr = sums.type.layout
    ROWS: gl.constexpr = sums.shape[1]
    column = (first + gl.arange(0, own, gl.SliceLayout(1, SUM)))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SUM))[None, :]
    stored = (column < work.num_columns) & (row < work.num_rows)
    out_at = work.out_ptr + gl.program_id(1) * work.stride_part + row * work.stride_out + column
    if shape.adds:
        sums += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, sums.to(work.out_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def _store_tile(outs, pipe, first, work, shape, ROWS: gl.constexpr):
    RED: gl.constexpr = gl.BlockedLayout(
        [shape.warps, 1, 1], [1, 32 // ROWS, ROWS], [1, shape.warps, 1], [2, 1, 0]
    )
    for own in gl.static_range(shape.each):
        pipe.shared.index(own).store(outs[own])
    if shape.activation is None:
        for own in gl.static_range(shape.each):
            _finish(
                gl.sum(pipe.shared.index(own).load(RED), 0) * work.factor, first + own * 16, work, shape, 16
            )
    else:
        gate = gl.sum(pipe.shared.index(0).load(RED), 0) * work.factor
        up = gl.sum(pipe.shared.index(1).load(RED), 0) * work.factor
        _finish(activate(gate, shape.activation) * up, first, work, shape, 16)


@gluon.jit
def _multiply(pipe, work, shape):
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    OWN: gl.constexpr = 16 if shape.activation is not None else 16 * shape.each
    dtype: gl.constexpr = work.x_ptr.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [shape.warps, 1, 1], [1, 16, 8])
    first = gl.program_id(0) * OWN * work.tiles
    first_span = gl.program_id(1) * (shape.warps * shape.turns)
    tiles = gl.minimum(work.tiles, (work.num_columns - first + OWN - 1) // OWN)
    if shape.rows == 1:
        _keep_row(pipe, work, shape)
        planes, totals = 0, 0
    else:
        gdc_wait()
        planes, totals = _load_rows(work, first_span, shape, SUMS)
    for tile in range(0, tiles):
        outs = ()
        for _ in gl.static_range(shape.each):
            outs = outs + (gl.zeros([shape.warps, 16, ROWS], gl.float32, SUMS),)
        if shape.rows == 1:
            for turn in range(shape.turns):
                outs = _step(
                    outs, pipe, planes, totals, tile * shape.turns + turn, turn, 0, shape, dtype, ROWS, SUMS
                )
        else:
            for turn in gl.static_range(shape.turns):
                outs = _step(
                    outs,
                    pipe,
                    planes,
                    totals,
                    tile * shape.turns + turn,
                    0,
                    turn * 8,
                    shape,
                    dtype,
                    ROWS,
                    SUMS,
                )
        _store_tile(outs, pipe, first + tile * OWN, work, shape, ROWS)


@gluon.jit(do_not_specialize=["num_rows", "tiles"])
def stream_tma_kernel(
    words_matrix, pairs_matrix, x_ptr, bias_ptr, norm_weight_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, stride_part, tiles, factor, eps,
    shape: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    gdc_launch_dependents()
    num_columns = num_weight_rows // (1 if shape.activation is None else 2)
    work = Work(
        x_ptr,
        norm_weight_ptr,
        bias_ptr,
        out_ptr,
        num_rows,
        num_columns,
        stride_x,
        stride_out,
        stride_part,
        tiles,
        factor,
        eps,
    )
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    KEPT: gl.constexpr = shape.turns if shape.rows == 1 else 1
    pipe = _Pipe(
        gl.allocate_shared_memory(
            gl.int32, [shape.stages * shape.each, shape.warps, 16, 32], words_matrix.layout
        ),
        gl.allocate_shared_memory(
            gl.int32, [shape.stages * shape.each * (256 // shape.group), shape.warps, 16], PAIRS
        ),
        gl.allocate_shared_memory(gl.int64, [shape.stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [shape.stages, 1], BARRIER),
        gl.allocate_shared_memory(
            gl.float32, [shape.each, shape.warps, 16, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        ),
        gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [KEPT, shape.warps, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
        gl.allocate_shared_memory(
            gl.float32, [KEPT, shape.warps, 256 // shape.group], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
    )
    for stage in gl.static_range(shape.stages):
        mbarrier.init(pipe.filled.index(stage), count=1)
        mbarrier.init(pipe.free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_multiply, (pipe, work, shape)), (_fetch, (words_matrix, pairs_matrix, pipe, work, shape))],
        [1],
        [24],
    )
