"""The kernel of packed_gemm: weights of 4 bits become operands in registers, and work is split along K.

    TMA warp (_fetch)                          two warpgroups (_multiply, _sum_units)

    words, pairs of the first units --> words  for each stripe, the last one first:
    wait for the kernel before                   for each of its units of 256 columns:
    for each unit of the program:                  wait words_filled[stage]
      wait free[stage]                             words, pairs --> registers
      rows of x --> rows                           for each atom of 64 columns:
      words, pairs of a later unit --> words         bits --> 16-bit floats, scaled (unpack_operands)
                                                     wait rows_filled[stage]
                                                     wgmma: sums of each block of rows += weights x rows
                                                     wgmmas before are done: arrive free
                                                 the last program of a stripe: add parts of others (split_k),
                                                   epilogue, store
                                                 others: store sums, count them (split_k)

Results are computed transposed, [weight rows, rows of x]: tensor cores take their first operand from
registers, so a weight never touches shared memory once it is a float. It is unpacked while the one before it
is multiplied (unpack_operands).

Shared memory:

    rows          | stage 0: atoms x blocks x [rows, 64] | stage 1 | ...    for whole units
    words         | stage 0: [128, 32] | stage 1 | ...     at least as many units as rows has
    pairs         | stage 0: [groups of a span, 128] | stage 1 | ...        as many as words has
    rows_filled   | one mbarrier per stage of rows         TMA has written the rows
    words_filled  | one mbarrier per stage of words        TMA has written the words and pairs
    free          | one mbarrier per stage of rows         its rows have been multiplied

When all rows of a unit have been multiplied, its words have been read as well. So words need no barrier of
their own for that: their stage is written again once the rows of their unit are free.
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

from octavo.forms.packed import PLANE, TILE
from octavo.gemm.hopper.packed.packed_gemm_tiling import ATOM, SPAN
from octavo.gemm.hopper.packed.split_k import Work, add_parts, leave_part, own_share, unit_at, units_of
from octavo.gemm.hopper.transposed_epilogue import finish
from octavo.gemm.hopper.unpack_operands import unpack_integers
from octavo.kernels.ring import steps_in_flight

_ATOM = gl.constexpr(ATOM)
_TILE = gl.constexpr(TILE)
_SPAN = gl.constexpr(SPAN)
# Words in a row of a span.
_WORDS = gl.constexpr(PLANE)


class Shape(NamedTuple):
    """Form of the weight, tiling and epilogue, all constants of the kernel.

    Attributes:
        group: columns of a group.
        rows: rows of x per block.
        blocks: blocks of rows of x.
        atoms: atoms of 64 columns in a stage of rows: 4, a whole span, or 2.
        row_stages: buffers for atoms of rows.
        word_stages: buffers for words.
        activation: name or None.
        adds: whether the result is added to the residual.
    """

    group: Any
    rows: Any
    blocks: Any
    atoms: Any
    row_stages: Any
    word_stages: Any
    activation: Any
    adds: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory and their barriers, as drawn above."""

    rows: Any
    words: Any
    pairs: Any
    rows_filled: Any
    words_filled: Any
    free: Any


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_spans", "num_units", "num_groups"])
def packed_gemm_kernel(
    x_matrix, words_matrix, pairs_matrix, result, parts,
    num_rows, num_columns, num_spans, num_units, num_groups, shape,
):  # fmt: skip
    """Grid: programs, at most one for each unit; see HopperMediumTiling."""
    gdc_launch_dependents()
    work = Work(num_rows, num_columns, num_spans, num_units, num_groups)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    GROUPS: gl.constexpr = _SPAN // shape.group
    pipe = _Pipe(
        gl.allocate_shared_memory(
            x_matrix.dtype,
            [shape.row_stages * shape.atoms * shape.blocks, shape.rows, _ATOM],
            x_matrix.layout,
        ),
        gl.allocate_shared_memory(gl.int32, [shape.word_stages, _TILE, _WORDS], WORDS),
        gl.allocate_shared_memory(gl.int32, [shape.word_stages, GROUPS, _TILE], PAIRS),
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
            (_multiply, (pipe, result, parts, work, shape)),
            (_fetch, (x_matrix, words_matrix, pairs_matrix, pipe, work, shape)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(x_matrix, words_matrix, pairs_matrix, pipe, work, shape):
    """Fetch as many words as fit; once the previous kernel has ended, rows and further words."""
    PARTS: gl.constexpr = _SPAN // (_ATOM * shape.atoms)
    LAG: gl.constexpr = shape.row_stages // PARTS
    share = own_share(work)
    count = share.end - share.first
    # With few rows, the words in flight are bounded; more rows multiply for longer than words take to arrive.
    STEP_BYTES: gl.constexpr = words_matrix.block_type.nbytes + pairs_matrix.block_type.nbytes
    AHEAD: gl.constexpr = (
        steps_in_flight(STEP_BYTES) if shape.rows * shape.blocks <= 32 else shape.word_stages
    )
    for turn in range(0, gl.minimum(count, shape.word_stages)):
        if turn >= AHEAD:
            mbarrier.wait(pipe.words_filled.index(turn - AHEAD), 0)
        _fetch_words(words_matrix, pairs_matrix, pipe, turn, share, work, shape)
    gdc_wait()
    for turn in range(0, count):
        unit = unit_at(turn, share, work)
        row = unit // work.num_spans % work.num_groups * (shape.rows * shape.blocks)
        column = unit % work.num_spans * _SPAN
        for part in gl.static_range(PARTS):
            stage = turn % LAG * PARTS + part
            mbarrier.wait(pipe.free.index(stage), (turn // LAG + 1) & 1)
            filled = pipe.rows_filled.index(stage)
            mbarrier.expect(filled, x_matrix.block_type.nbytes * shape.atoms * shape.blocks)
            for atom in gl.static_range(shape.atoms):
                for block in gl.static_range(shape.blocks):
                    at = [row + block * shape.rows, column + (part * shape.atoms + atom) * _ATOM]
                    buffer = pipe.rows.index((stage * shape.atoms + atom) * shape.blocks + block)
                    tma.async_copy_global_to_shared(x_matrix, at, filled, buffer)
        # The unit that freed these rows has been read.
        ahead = turn - LAG + shape.word_stages
        if (turn >= LAG) & (ahead < count):
            _fetch_words(words_matrix, pairs_matrix, pipe, ahead, share, work, shape)


@gluon.jit
def _fetch_words(words_matrix, pairs_matrix, pipe, turn, share, work, shape):
    """Fetch the words and pairs of one unit."""
    stage = turn % shape.word_stages
    filled = pipe.words_filled.index(stage)
    mbarrier.expect(filled, words_matrix.block_type.nbytes + pairs_matrix.block_type.nbytes)
    unit = unit_at(turn, share, work)
    tile, span = unit // work.num_spans // work.num_groups, unit % work.num_spans
    word, group = span * _WORDS, span * (_SPAN // shape.group)
    words, pairs = pipe.words.index(stage), pipe.pairs.index(stage)
    if shape.activation is None:
        tma.async_copy_global_to_shared(words_matrix, [tile * _TILE, word], filled, words)
        tma.async_copy_global_to_shared(pairs_matrix, [group, tile * _TILE], filled, pairs)
    else:
        words = words._reinterpret(gl.int32, words_matrix.block_shape, words_matrix.layout)
        pairs = pairs._reinterpret(gl.int32, pairs_matrix.block_shape, pairs_matrix.layout)
        at = tile * (_TILE // 16)
        tma.async_copy_global_to_shared(words_matrix, [at, 0, 0, word], filled, words)
        tma.async_copy_global_to_shared(pairs_matrix, [group, at, 0, 0], filled, pairs)


@gluon.jit
def _multiply(pipe, result, parts, work, shape):
    """Multiply all units of the program, apply the epilogue, store the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, shape.rows, 16])
    share = own_share(work)
    for back in range(0, share.tail - share.head + 1):
        stripe = share.tail - back
        first, end = units_of(stripe, share, work)
        # Units of later stripes have been multiplied before.
        turn = share.end - end
        sums = _sum_units(pipe, turn, turn + end - first, shape, SUMS)
        gdc_wait()
        if end == (stripe + 1) * work.num_spans:
            sums = add_parts(sums, stripe, parts, work, shape, SUMS)
            _finish_stripe(sums, stripe, result, work, shape, SUMS)
        else:
            leave_part(sums, stripe, parts, shape, SUMS)


@gluon.jit
def _finish_stripe(sums, stripe, result, work, shape, SUMS: gl.constexpr):
    """Turn all sums of a stripe into results."""
    tile = stripe // work.num_groups
    for block in gl.static_range(shape.blocks):
        row = (stripe % work.num_groups * shape.blocks + block) * shape.rows
        finish(sums[block], tile, row, result, work, shape, SUMS)


@gluon.jit
def _read_pairs(pipe, stage, shape, ROWS: gl.constexpr):
    """Return a unit's words of scales and minimums, [128] for each group."""
    GROUPS: gl.constexpr = _SPAN // shape.group
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    line = pipe.pairs.index(stage)._reinterpret(gl.int32, [GROUPS * _TILE], LINE)
    pairs = ()
    for group in gl.static_range(GROUPS):
        pairs = pairs + (line.slice(group * _TILE, _TILE).load(ROWS),)  # noqa: RUF005
    return pairs


@gluon.jit
def _sum_units(pipe, begin, end, shape, SUMS: gl.constexpr):
    """Return weights x rows over units begin : end of the program: [128, rows] float32 for each block."""
    PARTS: gl.constexpr = _SPAN // (_ATOM * shape.atoms)
    LAG: gl.constexpr = shape.row_stages // PARTS
    dtype: gl.constexpr = pipe.rows.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    sums = ()
    for _ in gl.static_range(shape.blocks):
        sums = sums + (gl.zeros([_TILE, shape.rows], gl.float32, SUMS),)  # noqa: RUF005
    # Tensor cores still read this operand while the next one is unpacked.
    before = gl.zeros([_TILE, _ATOM], dtype, A)
    for turn in range(begin, end):
        words_stage = turn % shape.word_stages
        mbarrier.wait(pipe.words_filled.index(words_stage), (turn // shape.word_stages) & 1)
        words = pipe.words.index(words_stage).load(A)
        pairs = _read_pairs(pipe, words_stage, shape, gl.SliceLayout(1, A))
        for atom in gl.static_range(_SPAN // _ATOM):
            # The upper bits are read again later: keeping all would take too many registers.
            if atom == 2:
                words = pipe.words.index(words_stage).load(A)
            stage = turn % LAG * PARTS + atom // shape.atoms
            bits = (words >> (16 * (atom // 2))).to(gl.int16)
            weights = unpack_integers(bits, pairs, atom // 2, atom % 2, shape.group, dtype)
            weights = gl.convert_layout(weights, A, assert_trivial=True)
            if atom % shape.atoms == 0:
                mbarrier.wait(pipe.rows_filled.index(stage), (turn // LAG) & 1)
            for block in gl.static_range(shape.blocks):
                x = pipe.rows.index((stage * shape.atoms + atom % shape.atoms) * shape.blocks + block)
                sums = _multiplied(weights, x.permute((1, 0)), sums, block)
            sums, before = _wait(shape.blocks, sums, before)
            before = weights
            if atom % shape.atoms == 0:
                done = turn * PARTS + atom // shape.atoms - 1
                free = pipe.free.index(gl.maximum(done, 0) % shape.row_stages)
                mbarrier.arrive(free, count=1, pred=done >= 0)
    sums, before = _wait(0, sums, before)
    return sums


@gluon.jit
def _multiplied(weights, x, sums, at: gl.constexpr):
    """Start wgmmas that add weights x rows to one of the sums."""
    added = warpgroup_mma(weights, x, sums[at], is_async=True)
    return sums[:at] + (added,) + sums[at + 1 :]  # noqa: RUF005


@gluon.jit
def _wait(pendings: gl.constexpr, sums, before):
    """Wait for all wgmmas but those of the last `pendings` blocks."""
    done = warpgroup_mma_wait(pendings, deps=sums + (before,))  # noqa: RUF005
    return done[: len(sums)], done[len(sums)]
