"""The kernel of few_linear: each warp streams its spans of a packed weight through its tensor cores.

    start    copies of the first spans and their pairs to shared memory
             wait for the kernel before; a single row of x is normed and kept in shared memory
    warp w   spans w, w + W, ...      copied some spans ahead
             planes of integers       bits become floats without arithmetic: q + ORIGIN
             sums += integers * x,    of a group, then scaled: scale * (sums - ORIGIN * total) + min * total
             total += x
    last     the warps' sums are added up

A tile of 32 words of a row, in the layout of a tensor core's operand, gives each thread eight neighbours: two
reads of 16 bytes. Their planes meet eight neighbours of x, another such read. So nothing moves between
threads.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.linear.grouped.unpack import unpack
from octavo.layers.triton.activation import activate


class Shape(NamedTuple):
    """Form of the weight, tiling and what is fused, all constants of the kernel.

    Attributes:
        bits: 4 or 8.
        group: columns of a group.
        size: K.
        rows: of x: 1, 8 or 16.
        columns: rows of the weight per program, a multiple of 16.
        warps: that share K.
        stages: spans of a warp in shared memory.
        norm: whether x is normed; with one row.
        bias: whether there is one.
        activation: name or None.
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
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    overlap: bool


@gluon.jit
def _keep_row(x_ptr, norm_weight_ptr, eps, TURNS: gl.constexpr, shape: gl.constexpr):
    """Keep a row of x, normed if that is asked for, in shared memory: [turns * planes, warps, 32]."""
    SPAN: gl.constexpr = 1024 // shape.bits
    TURN: gl.constexpr = SPAN * shape.warps
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    row = gl.allocate_shared_memory(dtype, [TURNS, TURN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    TILE: gl.constexpr = gl.BlockedLayout([8], [32], [shape.warps], [0])
    place = gl.arange(0, TURN, TILE)
    k = place // 32 % shape.warps * SPAN + place // (32 * shape.warps) * 32 + place % 32
    if shape.norm:
        squares = gl.zeros([TURN], gl.float32, TILE)
        for turn in gl.static_range(TURNS):
            at = k + turn * TURN
            x = gl.load(x_ptr + at, mask=at < shape.size, other=0.0).to(gl.float32)
            squares += x * x
        scale = gl.rsqrt(gl.sum(squares, 0) / shape.size + eps)
    for turn in gl.static_range(TURNS):
        at = k + turn * TURN
        x = gl.load(x_ptr + at, mask=at < shape.size, other=0.0)
        if shape.norm:
            norm_weight = gl.load(norm_weight_ptr + at, mask=at < shape.size, other=0.0).to(gl.float32)
            x = (x.to(gl.float32) * scale * norm_weight).to(dtype)
        row.index(turn).store(x)
    planes: gl.constexpr = [TURNS * (SPAN // 32), shape.warps, 32]
    return row._reinterpret(dtype, planes, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class _Copies(NamedTuple):
    """What a program copies of the weight, and where to.

    Attributes:
        words_at: [WARPS, COLUMNS, 32], words of the first span of each row.
        pairs_at: [GROUPS * WARPS, COLUMNS], pairs of the first group.
        warp: [WARPS, 1, 1], the warp of a word.
        warp_p: [GROUPS * WARPS, 1], the warp of a pair: groups of a span one after the other, each with all
            warps.
        step_p: [GROUPS * WARPS, 1], its group.
        words: [STAGES, WARPS, COLUMNS, 32] in shared memory.
        pairs: [STAGES, GROUPS * WARPS, COLUMNS] in shared memory.
    """

    words_at: Any
    pairs_at: Any
    warp: Any
    warp_p: Any
    step_p: Any
    words: Any
    pairs: Any


@gluon.jit
def _weight_row(first, index, num_columns, own: gl.constexpr):
    """Return the rows of the weight of some columns of a program, gate and up of `own` columns each.

    Rows past the end repeat the last one and are not stored.
    """
    return gl.minimum(first + index % own, num_columns - 1) + index // own * num_columns


@gluon.jit
def _plan_copies(words_ptr, pairs_ptr, first, num_columns, shape: gl.constexpr, own: gl.constexpr):
    """Return what to copy of a program's columns, from `first` on."""
    NUM_SPANS: gl.constexpr = (shape.size * shape.bits + 1023) // 1024
    PLACES: gl.constexpr = 1024 // shape.bits // shape.group * shape.warps
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [shape.warps, 1, 1], [2, 1, 0])
    COPY_PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [shape.warps, 1], [1, 0])
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    index = gl.arange(0, shape.columns, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    weight_row = _weight_row(first, index, num_columns, own)
    words_at = words_ptr + weight_row.to(gl.int64) * (NUM_SPANS * 32) + word
    place = gl.arange(0, PLACES, gl.SliceLayout(1, COPY_PAIRS))[:, None]
    index_p = gl.arange(0, shape.columns, gl.SliceLayout(0, COPY_PAIRS))[None, :]
    pairs_at = pairs_ptr + gl.minimum(first + index_p % own, num_columns - 1) + index_p // own * num_columns
    words = gl.allocate_shared_memory(
        gl.int32, [shape.stages, shape.warps, shape.columns, 32], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    pairs = gl.allocate_shared_memory(
        gl.int32, [shape.stages, PLACES, shape.columns], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    return _Copies(words_at, pairs_at, warp, place % shape.warps, place // shape.warps, words, pairs)


@gluon.jit
def _copy_spans(copies, turn, num_weight_rows, shape: gl.constexpr, is_masked: gl.constexpr):
    """Start to copy each warp's span of a turn, and its pairs; is_masked: unless the turn is past the end."""
    SPAN: gl.constexpr = 1024 // shape.bits
    GROUPS: gl.constexpr = SPAN // shape.group
    NUM_SPANS: gl.constexpr = (shape.size + SPAN - 1) // SPAN
    TURNS: gl.constexpr = (NUM_SPANS + shape.warps - 1) // shape.warps
    warp, warp_p = copies.warp, copies.warp_p
    # Spans past the end repeat the last one, and meet zeros.
    span = gl.minimum(turn * shape.warps + warp, NUM_SPANS - 1)
    async_copy.async_copy_global_to_shared(
        copies.words.index(turn % shape.stages),
        copies.words_at + span * 32,
        mask=warp * 0 + turn < TURNS if is_masked else None,
    )
    group = gl.minimum(turn * shape.warps + warp_p, NUM_SPANS - 1) * GROUPS + copies.step_p
    async_copy.async_copy_global_to_shared(
        copies.pairs.index(turn % shape.stages),
        copies.pairs_at + group * num_weight_rows,
        mask=warp_p * 0 + turn < TURNS if is_masked else None,
    )
    async_copy.commit_group()


@gluon.jit
def _load_plane(
    x_at, kept, turn, plane: gl.constexpr, half: gl.constexpr, num_rows, warp, k, row,
    shape: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Load the columns of x that meet a plane, [warp, k, row]: a single row from shared memory.

    Where a group is half a plane, all but the columns that meet that half are zero.
    """
    SPAN: gl.constexpr = 1024 // shape.bits
    if shape.rows == 1:
        x = kept.index(turn * (SPAN // 32) + plane).load(gl.SliceLayout(2, layout))
        x = gl.expand_dims(x, 2)
        if shape.group < 32:
            x = gl.where(k // shape.group == half, x, 0.0)
        return x.broadcast_to([shape.warps, 32, row.shape[2]])
    else:
        at = (turn * shape.warps + warp) * SPAN + plane * 32 + k
        inside = (at < shape.size) & (row < num_rows)
        if shape.group < 32:
            inside &= k // shape.group == half
        return gl.load(x_at + at, mask=inside, other=0.0)


@gluon.jit
def _store_result(
    result, bias_ptr, out_ptr, first, num_rows, num_columns, stride_out,
    shape: gl.constexpr, own: gl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a result [COLUMNS, rows] and store it."""
    LAYOUT: gl.constexpr = result.type.layout
    ROWS: gl.constexpr = result.shape[1]
    index = gl.arange(0, shape.columns, gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    if shape.bias:
        bias_row = _weight_row(first, index, num_columns, own)
        result += gl.load(bias_ptr + bias_row).to(gl.float32)[:, None]
    if shape.activation is not None:
        # Gate and up of a column are the same thread's.
        gate, up = gl.split(result.reshape([2, own, ROWS]).permute([1, 2, 0]))
        result = gl.convert_layout(activate(gate, shape.activation) * up, LAYOUT)
    column = first + gl.arange(0, own, gl.SliceLayout(1, LAYOUT))[:, None]
    stored = (column < num_columns) & (row < num_rows)
    out_at = out_ptr + row.to(gl.int64) * stride_out + column
    if shape.adds:
        result += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["num_rows"])
def few_linear_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, norm_weight_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, factor, eps,
    shape: gl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / columns of a program),).

    With an activation, the first half of a program's columns is gate, the other one up.
    """
    WARPS: gl.constexpr = shape.warps
    STAGES: gl.constexpr = shape.stages
    # Tensor cores multiply 8 rows at least; a single one is repeated.
    ROWS: gl.constexpr = 8 if shape.rows == 1 else shape.rows
    SPAN: gl.constexpr = 1024 // shape.bits
    TURNS: gl.constexpr = (shape.size + SPAN * WARPS - 1) // (SPAN * WARPS)
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    OWN: gl.constexpr = shape.columns // HALVES
    # Groups of half a plane: the other half of x is zero.
    PASSES: gl.constexpr = 32 // shape.group if shape.group < 32 else 1
    PLANES: gl.constexpr = shape.group // 32 if shape.group > 32 else 1
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ORIGIN: gl.constexpr = 0 if shape.bits == 8 else 128 if dtype == gl.bfloat16 else 1024
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    if shape.overlap:
        gdc_launch_dependents()
    num_columns = num_weight_rows // HALVES
    first = gl.program_id(0) * OWN
    copies = _plan_copies(words_ptr, pairs_ptr, first, num_columns, shape, OWN)
    for turn in gl.static_range(STAGES - 1):
        _copy_spans(copies, turn, num_weight_rows, shape, False)
    if shape.overlap:
        gdc_wait()

    kept = _keep_row(x_ptr, norm_weight_ptr, eps, TURNS, shape) if shape.rows == 1 else None
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    x_at = x_ptr + row.to(gl.int64) * stride_x
    ones = gl.full([WARPS, shape.columns, 32], 1.0, dtype, A)
    out = gl.zeros([WARPS, shape.columns, ROWS], gl.float32, SUMS)
    for turn in range(TURNS):
        async_copy.wait_group(STAGES - 2)
        _copy_spans(copies, turn + STAGES - 1, num_weight_rows, shape, True)
        planes = unpack(copies.words.index(turn % STAGES).load(A), shape.bits, dtype)
        for step in gl.static_range(SPAN // shape.group):
            sums = gl.zeros([WARPS, shape.columns, ROWS], gl.float32, SUMS)
            total = gl.zeros([WARPS, shape.columns, ROWS], gl.float32, SUMS)
            for plane in gl.static_range(step // PASSES * PLANES, (step // PASSES + 1) * PLANES):
                x = _load_plane(x_at, kept, turn, plane, step % PASSES, num_rows, warp, k, row, shape, B)
                sums = mma_v2(planes[plane], x, sums)
                total = mma_v2(ones, x, total)
            of_step = copies.pairs.index(turn % STAGES).slice(step * WARPS, WARPS, 0)
            pair = gl.expand_dims(of_step.load(gl.SliceLayout(2, SUMS)), 2)
            scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            out += scale * sums + (low - ORIGIN * scale) * total
    async_copy.wait_group(0)
    result = gl.sum(out, 0) * factor
    _store_result(result, bias_ptr, out_ptr, first, num_rows, num_columns, stride_out, shape, OWN)
