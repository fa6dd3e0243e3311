# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# The kernel language is not typed.
"""Decode on Hopper GPUs: a program is one warp, whose copies run ahead of its products from piece to piece.

A program that loads what it then uses waits most of its time where sequences are short: for the record of
its next piece of work, for a block's id, for keys. Here the copy engine always has the next tiles to fetch,
whatever sequence they are of, and with one warp nothing waits for another one.

    fetch     a0 a1 b0 b1 b2 c0 ...                      tiles of the pieces a, b, c
    attend       a0 a1 -> out, b0 b1 b2 -> out, c0 ...

The work is triton_decode's, cut into the same runs.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention import hopper_prefill
from octavo.attention.hopper_pieces import Run, merge_pieces, slot_of
from octavo.attention.hopper_pipe import clear_unseen, copy_tile, make_pipe, tile_place
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.triton_arguments import Call
from octavo.attention.triton_plan import ThinWork
from octavo.attention.triton_shapes import HOPPER_DECODE_SHAPE, HOPPER_LEAF_SHAPE, power_of_two
from octavo.attention.triton_tiles import LN_2
from octavo.attention.triton_units import RECORD


class Cursor(NamedTuple):
    """Where in its run a program is: at tile `at` of all, which is tile `tile` of a sequence's keys.

    unit: whose work it is.
    kv_head: of which head.
    left: tiles that the run has of this (unit, kv head), from here on.
    """

    at: Any
    unit: Any
    kv_head: Any
    tile: Any
    left: Any


def can_attend(call: Call, work: ThinWork) -> bool:
    """Say whether the kernel takes these arguments; the portable one takes all."""
    return work.shape in (HOPPER_DECODE_SHAPE, HOPPER_LEAF_SHAPE) and hopper_prefill.takes(
        call.q, call.k_cache, call.v_cache, call.options
    )


def attend_thin(call: Call, metadata: AttentionMetadata, work: ThinWork, *, early: bool) -> None:
    """Attend the thin units and write their rows of the results; clears rows that no sequence covers.

    Arguments as of triton_decode.attend_thin.
    """
    tile = work.shape
    shape = call.shape(tile)
    most_rows = min(tile.rows, power_of_two(metadata.max_query_len * shape.group.value))
    _attend_thin_kernel[(work.schedule.shape[0] - 2,)](
        *(call.queries, call.cache, *hopper_prefill.describe_caches(call, tile.keys), call.score),
        Run(work.units, work.schedule, work.arrivals, work.partial_out, work.partial_lse),
        *(metadata.cu_seqlens_q, metadata.seq_lens.shape[0], call.q.shape[0]),
        *(shape, most_rows, tile.num_stages, early),
        num_warps=1,
        maxnreg=tile.max_registers,
        launch_pdl=early,
    )


@gluon.jit(do_not_specialize=["num_sequences", "num_rows"])
def _attend_thin_kernel(
    queries, cache, k_matrix, v_matrix, places, score, run, cu_seqlens_q, num_sequences, num_rows, shape,
    ROWS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Work through one run of key tiles, as triton_decode does; ROWS of a tile's rows can exist."""
    if EARLY:
        gdc_launch_dependents()
    pipe = make_pipe(k_matrix, v_matrix, shape.keys, shape.head_dim, STAGES, 1)
    tiles_per_program = gl.load(run.schedule)
    begin = gl.program_id(0) * tiles_per_program
    end = gl.minimum(begin + tiles_per_program, gl.load(run.schedule + 1))
    source = (k_matrix, v_matrix, places, cache)
    # A program without work would begin behind the last unit.
    unit = gl.minimum(gl.load(run.schedule + 2 + gl.program_id(0)), num_sequences - 1)
    now = _enter(run, begin, end, unit, shape)
    ahead = now
    for _ in gl.static_range(STAGES - 1):
        ahead = _fetch(source, run, ahead, begin, end, pipe, shape)
    while now.at < end:
        top, total, values, ahead = _attend_piece(
            queries, run, now, ahead, begin, end, source, score, pipe, shape
        )
        _finish_piece(queries, run, now, tiles_per_program, top, total, values, shape, ROWS)
        now = _enter(run, now.at + now.left, end, now.unit, shape)
    _clear(queries, run.units, cu_seqlens_q, num_sequences, num_rows, shape)
    if EARLY and gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def _enter(run, at, end, unit, shape):
    """The cursor at tile `at` of the run, in `unit` or after it; units without keys are passed over."""
    while (at < end) & (gl.load(run.units + unit * RECORD + 7) <= at):
        unit += 1
    record = run.units + unit * RECORD
    first_tile = gl.load(record + 3) // shape.keys
    # One at least: past the run's end the record is anyone's.
    num_tiles = gl.maximum(1, gl.cdiv(gl.load(record + 4), shape.keys) - first_tile)
    unit_begin = gl.load(record + 7) - num_tiles * shape.kv_heads
    kv_head = (at - unit_begin) // num_tiles
    done = at - unit_begin - kv_head * num_tiles
    return Cursor(at, unit, kv_head, first_tile + done, gl.minimum(num_tiles - done, end - at))


@gluon.jit
def _fetch(source, run, ahead, begin, end, pipe, shape):
    """Have the next tile copied, if the run has another one; returns the cursor after it."""
    at, unit, kv_head, tile, left = ahead
    if at < end:
        k_matrix, v_matrix, places, cache = source
        table = cache.table + gl.load(run.units + unit * RECORD).to(gl.int64) * cache.table_row
        place = tile_place(places, table, tile, kv_head, shape, shape.keys)
        stage = (at - begin) % pipe.stages
        copy_tile(k_matrix, place, pipe.k_filled.index(stage), pipe.k.index(stage))
        copy_tile(v_matrix, place, pipe.v_filled.index(stage), pipe.v.index(stage))
        at, tile, left = at + 1, tile + 1, left - 1
        if left == 0:
            at, unit, kv_head, tile, left = _enter(run, at, end, unit, shape)
    return Cursor(at, unit, kv_head, tile, left)


@gluon.jit
def _attend_piece(queries, run, now, ahead, begin, end, source, score, pipe, shape):
    """Attend the piece at the cursor, and have as many further tiles copied.

    Returns:
        (top [R], total [R], values [R, D]) float32, the state of a running softmax; the cursor of copies.
    """
    KEYS: gl.constexpr = shape.keys
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    record = run.units + now.unit * RECORD
    kv_end = gl.load(record + 4)
    q = _load_queries(queries, record, now.kv_head, shape, gl.DotOperandLayout(0, MMA, 2))
    token, valid = _tokens(record, shape, ROW)
    position = gl.load(queries.positions + token, mask=valid, other=-1)
    factor = score.factor
    top = gl.full([shape.rows], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([shape.rows], 0.0, gl.float32, layout=ROW)
    values = gl.zeros([shape.rows, shape.head_dim], gl.float32, layout=MMA)
    for i in range(0, now.left):
        # Into the buffer of the tile before, which nobody reads any more.
        ahead = _fetch(source, run, ahead, begin, end, pipe, shape)
        number, start = now.at - begin + i, (now.tile + i) * KEYS
        stage, phase = number % pipe.stages, (number // pipe.stages) & 1
        mbarrier.wait(pipe.k_filled.index(stage), phase)
        k = pipe.k.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        s = mma_v2(q, k, gl.zeros([shape.rows, KEYS], gl.float32, layout=MMA))
        key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))
        visible = (key[None, :] <= position[:, None]) & (key < kv_end)[None, :]
        if shape.windowed:
            visible = visible & (key[None, :] > position[:, None] - score.window)
        s = gl.where(visible, s, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1) * factor)
        # A row that has seen nothing keeps -inf; from 0 its weights are exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weights = gl.exp2(s * factor - base[:, None])
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.sum(weights, 1)
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        if kv_end - start < KEYS:
            clear_unseen(pipe.v.index(stage), kv_end - start, KEYS, shape.head_dim, 1)
        v = pipe.v.index(stage).load(gl.DotOperandLayout(1, MMA, 2))
        weights = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, MMA, 2))
        values = mma_v2(weights, v, values * shrink[:, None])
        top = new_top
    return top, total, values, ahead


@gluon.jit
def _tokens(record, shape, ROW: gl.constexpr):
    """Each row's token [R] int64, and whether it exists [R]."""
    row = gl.arange(0, shape.rows, layout=ROW)
    token = gl.load(record + 1) + row // shape.group
    return token.to(gl.int64), row < gl.load(record + 2) * shape.group


@gluon.jit
def _load_queries(queries, record, kv_head, shape, LAYOUT: gl.constexpr):
    """Load the unit's queries [R, D] as the left operand of a product."""
    token, valid = _tokens(record, shape, gl.SliceLayout(1, LAYOUT))
    head = kv_head * shape.group + gl.arange(0, shape.rows, layout=gl.SliceLayout(1, LAYOUT)) % shape.group
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    return gl.load(pointers, mask=valid[:, None], other=0.0)


@gluon.jit
def _finish_piece(queries, run, now, tiles_per_program, top, total, values, shape, ROWS: gl.constexpr):
    """Write a piece's rows if it is all its unit has; else leave them: whoever is last merges them all."""
    MMA: gl.constexpr = values.type.layout
    record = run.units + now.unit * RECORD
    first_tile = gl.load(record + 3) // shape.keys
    num_tiles = gl.cdiv(gl.load(record + 4), shape.keys) - first_tile
    head_begin = now.at - (now.tile - first_tile)
    first_program = head_begin // tiles_per_program
    num_pieces = (head_begin + num_tiles - 1) // tiles_per_program - first_program + 1
    row = gl.arange(0, shape.rows, layout=gl.SliceLayout(1, MMA))
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, MMA))
    token, valid = _tokens(record, shape, gl.SliceLayout(1, MMA))
    safe = gl.where(total > 0, total, 1.0)
    out = values / safe[:, None]
    lse = gl.where(total > 0, (top + gl.log2(safe)) * LN_2, float("-inf"))
    if num_pieces == 1:
        at = token * (shape.group * shape.kv_heads) + now.kv_head * shape.group + row % shape.group
        final = queries.out + (at * shape.head_dim)[:, None] + d[None, :]
        gl.store(final, out.to(queries.out.dtype.element_ty), mask=valid[:, None])
        gl.store(queries.lse + at, lse, mask=valid)
    else:
        place = slot_of(now.at, tiles_per_program) * shape.rows + row
        partial = run.partial_out + (place * shape.head_dim)[:, None] + d[None, :]
        gl.store(partial, out, mask=valid[:, None])
        gl.store(run.partial_lse + place, lse, mask=valid)
        gl.thread_barrier()
        counter = run.arrivals + now.unit * shape.kv_heads + now.kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_pieces - 1:
            # Zero again for the next layer, whose kernel starts when this one has ended.
            gl.store(counter, 0)
            merge_pieces(
                queries, run, record, now.kv_head, head_begin, first_program, num_pieces,
                tiles_per_program, shape, ROWS,
            )  # fmt: skip


@gluon.jit
def _clear(queries, units, cu_seqlens_q, num_sequences, num_rows, shape):
    """Give tokens of units without keys, and rows that no sequence covers, 0 and -inf."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    for unit in range(program, num_sequences, num_programs):
        record = units + unit * RECORD
        num_tokens = gl.where(gl.load(record + 4) <= gl.load(record + 3), gl.load(record + 2), 0)
        _clear_tokens(queries, gl.load(record + 1), num_tokens, 0, 1, shape)
    num_covered = gl.load(cu_seqlens_q + num_sequences)
    _clear_tokens(queries, num_covered, num_rows - num_covered, program, num_programs, shape)


@gluon.jit
def _clear_tokens(queries, token_begin, num_tokens, first, step, shape):
    """Each step-th of the tokens' (token, head) rows, from the first-th on."""
    WIDTH: gl.constexpr = shape.group * shape.kv_heads
    d = gl.arange(0, shape.head_dim, layout=gl.BlockedLayout([1], [32], [1], [0]))
    zero = gl.full([shape.head_dim], 0.0, queries.out.dtype.element_ty, layout=d.type.layout)
    for index in range(first, num_tokens * WIDTH, step):
        at = token_begin.to(gl.int64) * WIDTH + index
        gl.store(queries.out + at * shape.head_dim + d, zero)
        gl.store(queries.lse + at, float("-inf"))
