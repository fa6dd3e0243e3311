"""The kernel of hopper_some_linear: weights of 4 bits become operands in registers, and meet rows of x.

    TMA warp (_fetch)                          two warpgroups (_multiply, _sum_spans)

    words of the first spans --> words         for each span of 256 columns:
    wait for the kernel before                   wait words_filled[stage]
    for each span of 256 columns:                words --> registers
      for each half of it:                       for each half, for each atom of 64 columns in it:
        wait free[stage]                           for each tile of 128 rows of the weight:
        rows of x --> rows                           bits --> 16-bit floats, scaled (unpack)
      words of a later span --> words                wait rows_filled[stage]
                                                     wgmma: sums += weights x rows
                                                     wgmmas before are done; after a half: arrive free
                                               epilogue, store (results)

Results are computed transposed, [weight rows, rows of x]: tensor cores take their first operand from
registers, so that a weight never touches shared memory once it is a float. It is put together while the one
before it is multiplied.

Shared memory:

    rows          | stage 0: 2 atoms [rows, 64] | stage 1 | ...    an even number: whole spans
    words         | stage 0: tiles x [128, 32] | stage 1 | ...     at least as many spans as rows has
    rows_filled   | one mbarrier per stage of rows     TMA has written the rows
    words_filled  | one mbarrier per stage of words    TMA has written the words
    free          | one mbarrier per stage of rows     half a span has been multiplied

When both halves of a span have been multiplied, its words have been read as well. So words need no barrier
that says so: their stage is written again when the second half of their span has made room.
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

from octavo.layers.linear.grouped.hopper.results import Work, finish, weight_rows
from octavo.layers.linear.grouped.hopper.tiling import ATOM, TILE
from octavo.layers.linear.grouped.hopper.unpack import unpacked

_ATOM = gl.constexpr(ATOM)
_TILE = gl.constexpr(TILE)
# Columns of a span, atoms of half a span, words of a span.
_SPAN = gl.constexpr(256)
_ATOMS = gl.constexpr(2)
_WORDS = gl.constexpr(32)


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
def _multiply(pairs_ptr, pipe, result, work, shape):
    """Multiply all spans, apply the epilogue, store the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, shape.rows, 16])
    sums = _sum_spans(pairs_ptr, pipe, work, shape, SUMS)
    gdc_wait()
    for own in gl.static_range(shape.tiles):
        finish(sums[own], gl.program_id(1) * shape.tiles + own, result, work, shape, SUMS)


@gluon.jit
def _read_words(pipe, stage, shape, A: gl.constexpr):
    """Return a span's words of each tile, [128, 32] in the order in which tensor cores take weights."""
    words = ()
    for own in gl.static_range(shape.tiles):
        words = words + (pipe.words.index(stage * shape.tiles + own).load(A),)  # noqa: RUF005
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
        weight_row = weight_rows(tile, index, work.num_columns, shape)
        for group in gl.static_range(GROUPS):
            at = (span * GROUPS + group) * num_weight_rows
            pairs = pairs + (gl.load(pairs_ptr + at + weight_row),)  # noqa: RUF005
    return pairs


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
        sums = sums + (gl.zeros([_TILE, shape.rows], gl.float32, SUMS),)  # noqa: RUF005
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
                    weights = unpacked(bits, of_tile, half, atom, shape.group, dtype)
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
