"""The kernel of hopper_some_linear: weights of 4 bits become operands in registers, and meet rows of x.

    TMA warp (_fetch)                          warpgroup p of 4 warps (_multiply, _sum_spans)

    words of the first spans --> words         wait for words
    wait for the kernel before                 words of its `height` rows --> registers
    for each span of 256 columns:              for each atom of 64 columns of the span:
      for each atom of 64 columns:               two planes of bits --> 16-bit floats, scaled
        wait free[stage]                         wait rows_filled[stage]
        rows of x --> rows                       wgmma: sums += weights x rows
      words of a later span --> words            the atom before is done: arrive free[its stage]
                                               epilogue, store

The result is computed transposed, [weight rows, rows of x]: tensor cores read their first operand from registers,
so that a weight never touches shared memory once it is a float. Bits and scales are put together while
the atom before is multiplied, by this warpgroup and by the others.

Shared memory:

    rows          | stage 0: [rows, 64] | stage 1 | ...         a multiple of 4 stages: whole spans
    words         | stage 0: warpgroups x [height, 32] | ...    at least as many spans as rows has
    rows_filled   | one mbarrier per stage of rows    TMA has written the rows
    words_filled  | one mbarrier per stage of words   TMA has written the words
    free          | one mbarrier per stage of rows    all warpgroups have multiplied an atom

When all atoms of a span have been multiplied, its words have been read as well. So words need no barrier that
says so: their stage is written again when the last atom of their span has made room.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.linear.grouped.hopper.tiling import ATOM, TILE
from octavo.layers.triton.activation import activate

_ATOM = gl.constexpr(ATOM)
# Columns of a span, atoms of half a span, words of a span.
_SPAN = gl.constexpr(256)
_ATOMS = gl.constexpr(2)
_WORDS = gl.constexpr(32)
# Rows of the weight that two warpgroups multiply by one wgmma each.
_TILE = gl.constexpr(TILE)


# Two 16-bit floats whose last bits are worth 1, 128 or 1024, and what is added once they hold q as well.
_BFLOAT16_ORIGIN, _BFLOAT16_OFFSET = 0x43004300, 0xC308C308
_FLOAT16_ORIGIN, _FLOAT16_OFFSET = 0x64006400, 0xE400E400


@gluon.constexpr_function
def scale_asm(plane, is_bfloat16):
    """Return PTX for two 16-bit numbers' plane of 4 bits: (q + origin + offset) * scale + minimum."""
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    origin = _BFLOAT16_ORIGIN if is_bfloat16 else _FLOAT16_ORIGIN
    offset = _BFLOAT16_OFFSET if is_bfloat16 else _FLOAT16_OFFSET
    # Scale and minimum are twice in a word, and words come in pairs, like the numbers. 0xEA: (a and b) or c.
    return (
        "{ .reg .b32 bits, offset;\n"
        f"shr.u32 bits, $1, {4 * plane};\n"
        f"lop3.b32 bits, bits, 0x000F000F, {origin:#x}, 0xEA;\n"
        f"mov.b32 offset, {offset:#x};\n"
        f"add.rn.{kind} bits, bits, offset;\n"
        f"fma.rn.{kind} $0, bits, $2, $4; }}"
    )


class Shape(NamedTuple):
    """Form of the weight, tiling and epilogue, all constants of the kernel.

    Attributes:
        group: columns of a group.
        rows: of x per program.
        tiles: of 128 rows of the weight per program.
        row_stages: buffers for atoms of rows.
        word_stages: buffers for words.
        activation: name or None.
        adds: whether the result is added to the residual.
    """

    group: Any
    rows: Any
    tiles: Any
    row_stages: Any
    word_stages: Any
    activation: Any
    adds: Any


class Work(NamedTuple):
    """What programs multiply; all sizes are those of the whole product.

    Attributes:
        num_rows: M.
        num_columns: of the result.
        num_spans: of a row of the weight.
        each: spans of a program, but the last ones.
    """

    num_rows: Any
    num_columns: Any
    num_spans: Any
    each: Any


class Result(NamedTuple):
    """Where results go: row r of part s of K begins at out + s * stride_part + r * stride."""

    out: Any
    stride: Any
    stride_part: Any
    bias: Any
    factor: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory and their barriers, as drawn above."""

    rows: Any
    words: Any
    rows_filled: Any
    words_filled: Any
    free: Any


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_spans", "each"])
def hopper_some_kernel(
    x_matrix, words_matrix, pairs_ptr, result, num_rows, num_columns, num_spans, each, shape
):  # fmt: skip
    """Grid: (ceil(M / rows), ceil(columns of the result / those of a tile), parts of K)."""
    gdc_launch_dependents()
    work = Work(num_rows, num_columns, num_spans, each)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    pipe = _Pipe(
        gl.allocate_shared_memory(
            x_matrix.dtype, [shape.row_stages * _ATOMS, shape.rows, _ATOM], x_matrix.layout
        ),
        gl.allocate_shared_memory(gl.int32, [shape.word_stages * shape.tiles, _TILE, _WORDS], WORDS),
        gl.allocate_shared_memory(gl.int64, [shape.row_stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [shape.word_stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [shape.row_stages, 1], BARRIER),
    )
    for stage in gl.static_range(shape.row_stages):
        mbarrier.init(pipe.rows_filled.index(stage), count=1)
        mbarrier.init(pipe.free.index(stage), count=1)
    for stage in gl.static_range(shape.word_stages):
        mbarrier.init(pipe.words_filled.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (pairs_ptr, pipe, result, work, shape)),
            (_fetch, (x_matrix, words_matrix, pipe, work, shape)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(x_matrix, words_matrix, pipe, work, shape):
    """Fetch as many words as fit, then, once the kernel before has ended, rows and further words."""
    LAG: gl.constexpr = shape.row_stages // 2
    first = gl.program_id(2) * work.each
    count = gl.minimum(work.num_spans - first, work.each)
    for turn in range(0, gl.minimum(count, shape.word_stages)):
        _fetch_words(words_matrix, pipe, first, turn, shape)
    gdc_wait()
    row = gl.program_id(0) * shape.rows
    for turn in range(0, count):
        for half in gl.static_range(2):
            stage = turn % LAG * 2 + half
            mbarrier.wait(pipe.free.index(stage), (turn // LAG + 1) & 1)
            filled = pipe.rows_filled.index(stage)
            mbarrier.expect(filled, x_matrix.block_type.nbytes * _ATOMS)
            for atom in gl.static_range(_ATOMS):
                at = [row, (first + turn) * _SPAN + (half * _ATOMS + atom) * _ATOM]
                buffer = pipe.rows.index(stage * _ATOMS + atom)
                tma.async_copy_global_to_shared(x_matrix, at, filled, buffer)
        # The span whose halves made room has been read.
        ahead = turn - LAG + shape.word_stages
        if (turn >= LAG) & (ahead < count):
            _fetch_words(words_matrix, pipe, first, ahead, shape)


@gluon.jit
def _fetch_words(words_matrix, pipe, first, turn, shape):
    """Fetch one span of words."""
    stage = turn % shape.word_stages
    filled = pipe.words_filled.index(stage)
    mbarrier.expect(filled, words_matrix.block_type.nbytes * shape.tiles)
    word = (first + turn) * _WORDS
    for own in gl.static_range(shape.tiles):
        tile = gl.program_id(1) * shape.tiles + own
        buffer = pipe.words.index(stage * shape.tiles + own)
        if shape.activation is None:
            tma.async_copy_global_to_shared(words_matrix, [tile * _TILE, word], filled, buffer)
        else:
            buffer = buffer._reinterpret(gl.int32, words_matrix.block_shape, words_matrix.layout)
            at = [tile * (_TILE // 16), 0, 0, word]
            tma.async_copy_global_to_shared(words_matrix, at, filled, buffer)


@gluon.jit
def _weight_rows(tile, index, num_columns, shape):
    """Return the weight's rows of a tile: with an activation 8 of gate, then 8 of up, by turns."""
    if shape.activation is None:
        return gl.minimum(tile * _TILE + index, num_columns - 1)
    else:
        column = tile * (_TILE // 2) + index // 16 * 8 + index % 8
        return gl.minimum(column, num_columns - 1) + index // 8 % 2 * num_columns


@gluon.jit
def _multiply(pairs_ptr, pipe, result, work, shape):
    """Multiply all spans, apply the epilogue, store the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, shape.rows, 16])
    sums = _sum_spans(pairs_ptr, pipe, work, shape, SUMS)
    gdc_wait()
    for own in gl.static_range(shape.tiles):
        _finish(sums[own], gl.program_id(1) * shape.tiles + own, result, work, shape, SUMS)


@gluon.jit
def _finish(sums, tile, result, work, shape, SUMS: gl.constexpr):
    """Apply the epilogue to a tile's sums and store the results."""
    sums *= result.factor
    if result.bias is not None:
        index = gl.arange(0, _TILE, gl.SliceLayout(1, SUMS))
        weight_row = _weight_rows(tile, index, work.num_columns, shape)
        sums += gl.load(result.bias + weight_row).to(gl.float32)[:, None]
    if shape.activation is None:
        _store(sums, tile * _TILE, result, work, shape, SUMS)
    else:
        # Gate and up of a column are the same thread's.
        HALF: gl.constexpr = _half_layout(shape.rows)
        gate, up = sums.reshape([_TILE // 16, 2, 8, shape.rows]).permute([0, 2, 3, 1]).split()
        out = (activate(gate, shape.activation) * up).reshape([_TILE // 2, shape.rows])
        out = gl.convert_layout(out, HALF, assert_trivial=True)
        _store(out, tile * (_TILE // 2), result, work, shape, HALF)


@gluon.constexpr_function
def _half_layout(rows):
    """Return the layout that sums have when gate and up have become one: 8 columns of each warp's 16."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, 8 << i] for i in range((rows // 8).bit_length() - 1))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[64, rows],
    )


@gluon.jit
def _store(sums, first, result, work, shape, LAYOUT: gl.constexpr):
    """Store [columns, rows] as rows of the result, added to what is there if asked for."""
    column = first + gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.program_id(0) * shape.rows + gl.arange(0, shape.rows, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (column < work.num_columns) & (row < work.num_rows)
    out = result.out + gl.program_id(2).to(gl.int64) * result.stride_part
    out_at = out + row.to(gl.int64) * result.stride + column
    if shape.adds:
        sums += gl.load(out_at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_at, sums.to(result.out.dtype.element_ty), mask=inside)


@gluon.jit
def _read_words(pipe, stage, shape, A: gl.constexpr):
    """Return a span's words of each tile, [128, 32] in the order in which tensor cores take weights."""
    words = ()
    for own in gl.static_range(shape.tiles):
        words = words + (pipe.words.index(stage * shape.tiles + own).load(A),)
    return words


@gluon.jit
def _read_pairs(pairs_ptr, span, work, shape, ROWS: gl.constexpr):
    """Return the words of scales and minimums of a span: [128] of each tile and, within it, group."""
    GROUPS: gl.constexpr = _SPAN // shape.group
    num_weight_rows = work.num_columns * (1 if shape.activation is None else 2)
    index = gl.arange(0, _TILE, ROWS)
    pairs = ()
    for own in gl.static_range(shape.tiles):
        tile = gl.program_id(1) * shape.tiles + own
        weight_row = _weight_rows(tile, index, work.num_columns, shape)
        for group in gl.static_range(GROUPS):
            at = (span * GROUPS + group) * num_weight_rows
            pairs = pairs + (gl.load(pairs_ptr + at + weight_row),)
    return pairs


@gluon.jit
def _twice(pair, dtype: gl.constexpr):
    """Return a scale, and what is added to its products, each twice in a word."""
    if dtype == gl.bfloat16:
        # scale * (q - 8) + (min + 8 scale): small numbers, so that bfloat16 holds them well.
        return gl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .f32 scale, low;
            mov.b32 {a, b}, $2; cvt.f32.f16 scale, a; cvt.f32.f16 low, b;
            fma.rn.f32 low, scale, 0f41000000, low;
            cvt.rn.bf16x2.f32 $0, scale, scale; cvt.rn.bf16x2.f32 $1, low, low; }""",
            "=r,=r,r",
            [pair],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;",
            "=r,=r,r",
            [pair],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _scaled(bits, plane: gl.constexpr, scale, low, dtype: gl.constexpr):
    """Return a plane of 16-bit numbers as floats, scaled."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            scale_asm(plane, True),
            "=r,r,r,r,r,r",
            [bits, scale, low],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            scale_asm(plane, False),
            "=r,r,r,r,r,r",
            [bits, scale, low],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def _weights(bits, pairs, half: gl.constexpr, atom: gl.constexpr, group: gl.constexpr, dtype: gl.constexpr):
    """Return an atom of 64 columns as floats, of half a span's bits and the span's pairs."""
    FIRST: gl.constexpr = (half * _ATOMS + atom) * _ATOM
    scale, low = _twice(pairs[FIRST // group], dtype)
    left = _scaled(bits, 2 * atom, scale[:, None], low[:, None], dtype)
    if group < _ATOM:
        scale, low = _twice(pairs[FIRST // group + 1], dtype)
    right = _scaled(bits, 2 * atom + 1, scale[:, None], low[:, None], dtype)
    return gl.join(left, right).permute([0, 2, 1]).reshape([_TILE, _ATOM])


@gluon.jit
def _sum_spans(pairs_ptr, pipe, work, shape, SUMS: gl.constexpr):
    """Return weights x rows over the program's part of K: [128, rows] float32 of each tile."""
    LAG: gl.constexpr = shape.row_stages // 2
    GROUPS: gl.constexpr = _SPAN // shape.group
    dtype: gl.constexpr = pipe.rows.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    first = gl.program_id(2) * work.each
    count = gl.minimum(work.num_spans - first, work.each)
    pairs = _read_pairs(pairs_ptr, first, work, shape, gl.SliceLayout(1, A))
    sums = ()
    for _ in gl.static_range(shape.tiles):
        sums = sums + (gl.zeros([_TILE, shape.rows], gl.float32, SUMS),)
    # Tensor cores still read it while the next one is put together.
    before = gl.zeros([_TILE, _ATOM], dtype, A)
    for turn in range(0, count):
        stage = turn % shape.word_stages
        mbarrier.wait(pipe.words_filled.index(stage), (turn // shape.word_stages) & 1)
        words = _read_words(pipe, stage, shape, A)
        now = pairs
        ahead = first + gl.minimum(turn + 1, count - 1)
        pairs = _read_pairs(pairs_ptr, ahead, work, shape, gl.SliceLayout(1, A))
        for half in gl.static_range(2):
            # Many sums leave few registers: the upper bits are read again.
            if (half == 1) & (shape.tiles * shape.rows == 256):
                words = _read_words(pipe, turn % shape.word_stages, shape, A)
            stage = turn % LAG * 2 + half
            for atom in gl.static_range(_ATOMS):
                for own in gl.static_range(shape.tiles):
                    bits = (words[own] >> (16 * half)).to(gl.int16)
                    of_tile = now[own * GROUPS : (own + 1) * GROUPS]
                    weights = _weights(bits, of_tile, half, atom, shape.group, dtype)
                    weights = gl.convert_layout(weights, A, assert_trivial=True)
                    if (atom == 0) & (own == 0):
                        mbarrier.wait(pipe.rows_filled.index(stage), (turn // LAG) & 1)
                    x = pipe.rows.index(stage * _ATOMS + atom).permute((1, 0))
                    sums = _multiplied(weights, x, sums, own, before)
                    before = weights
                    if (atom == 0) & (own == 0):
                        last = gl.maximum(turn * 2 + half - 1, 0) % shape.row_stages
                        mbarrier.arrive(pipe.free.index(last), count=1, pred=turn * 2 + half > 0)
    return _finished(sums, before)


@gluon.jit
def _multiplied(weights, x, sums, own: gl.constexpr, before):
    """Start wgmmas that add weights x rows to a tile's sums, and wait for those before."""
    if len(sums) == 1:
        (first,) = sums
        first = warpgroup_mma(weights, x, first, is_async=True)
        first, before = warpgroup_mma_wait(1, deps=(first, before))
        return (first,)
    else:
        first, second = sums
        if own == 0:
            first = warpgroup_mma(weights, x, first, is_async=True)
        else:
            second = warpgroup_mma(weights, x, second, is_async=True)
        first, second, before = warpgroup_mma_wait(1, deps=(first, second, before))
        return (first, second)


@gluon.jit
def _finished(sums, before):
    """Wait for the last wgmmas."""
    if len(sums) == 1:
        (first,) = sums
        first, before = warpgroup_mma_wait(0, deps=(first, before))
        return (first,)
    else:
        first, second = sums
        first, second, before = warpgroup_mma_wait(0, deps=(first, second, before))
        return (first, second)
