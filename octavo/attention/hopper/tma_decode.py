"""Decode on Hopper GPUs: each program is one warp, and its TMA copies run ahead of its products.

A program that loads a tile only when it needs it waits most of its time on short sequences: for the record of
its next unit, for a block id, for keys. Here TMA always has the next tiles to fetch, whichever sequence they
belong to. There is one warp per program, so no warp ever waits for another one.

    one program = 1 warp                                  shared memory: STAGES = 3 (LEAF shapes: 2)

      fetch(tile n + 2) --TMA--> k[(n + 2) % 3] [KEYS, D] --> k_filled[(n + 2) % 3]
                        --TMA--> v[(n + 2) % 3] [KEYS, D] --> v_filled[(n + 2) % 3]

      wait k_filled[(n + 1) % 3] -> scores of tile n + 1
                                    softmax of tile n
      wait v_filled[n % 3]       -> values += v * weights of tile n

    tiles of the pieces a, b, c:
      fetch     a0 a1 b0 b1 b2 c0 ...                     at most STAGES - 1 tiles ahead of attend
      attend       a0 a1 -> out, b0 b1 b2 -> out, c0 ...

Each barrier has phase (tile number // STAGES) % 2. The `free` barriers of the pipe stay unused: the warp that
starts a copy into a buffer is the one that has read the buffer before.

While kernels before still run, programs find their run and start to copy tiles without a new key, where
metadata.keys_are_old.

decode_runs.py says which tiles a program works on, and how programs merge a (unit, kv head) that they share.
The runs are those of triton/paged_decode.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.hopper.decode_runs import (
    Run,
    fetch,
    holds_newest_key,
    look_ahead,
    merge_pieces,
    next_piece,
    partial_id,
    start_run,
)
from octavo.attention.hopper.pipe import cache_unsupported_reason, describe_caches, make_pipe
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.triton.kernel_call import Call, DecodeWork
from octavo.attention.triton.step_map import RECORD
from octavo.attention.triton.tiles import LN_2
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlaps

# Layout of both products' results: a warp's tile has 16 rows and 8 columns.
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))


def unsupported_reason(call: Call, work: DecodeWork) -> str | None:
    """Return why the kernel cannot run a call's decode units, or None if it can."""
    if work.shape.num_warps != 1:
        return "the units are tiled for the portable kernel"
    return cache_unsupported_reason(call)


def attend_decode(call: Call, metadata: AttentionMetadata, work: DecodeWork, *, early: bool) -> None:
    """Attend the decode units and write their rows of the results; clears rows that no sequence covers.

    The arguments are those of triton.paged_decode.attend_decode.
    """
    tile = work.shape
    shape = call.shape(tile)
    overlap = overlaps(call.q)
    keys_are_old = metadata.keys_are_old and overlap and not early
    most_rows = min(tile.rows, power_of_two(metadata.max_query_len * shape.group.value))
    k_matrix, v_matrix, places = describe_caches(call, tile.keys)
    launch(
        _attend_decode_kernel,
        (work.schedule.shape[0] - 2,),
        queries=call.queries, cache=call.cache, k_matrix=k_matrix, v_matrix=v_matrix, places=places,
        score=call.score,
        run=Run(work.units, work.schedule, work.arrivals, work.partial_out, work.partial_lse),
        cu_seqlens_q=metadata.cu_seqlens_q, num_sequences=metadata.seq_lens.shape[0],
        num_rows=call.q.shape[0], shape=shape, MERGED_ROWS=most_rows, STAGES=tile.num_stages,
        CAUSAL=metadata.max_query_len > 1, OVERLAP=overlap, EARLY=early and overlap,
        KEYS_ARE_OLD=keys_are_old,
        num_warps=1, maxnreg=tile.max_registers, launch_pdl=overlap,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_sequences", "num_rows"])
def _attend_decode_kernel(
    queries, cache, k_matrix, v_matrix, places, score, run, cu_seqlens_q, num_sequences, num_rows, shape,
    MERGED_ROWS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, OVERLAP: gl.constexpr,
    EARLY: gl.constexpr, KEYS_ARE_OLD: gl.constexpr,
):  # fmt: skip
    """Work through one run of key tiles; at most MERGED_ROWS of a tile's rows exist."""
    # The tensor cores' smallest product has 8 columns.
    ROWS: gl.constexpr = MERGED_ROWS if MERGED_ROWS > 8 else 8
    if OVERLAP:
        gdc_launch_dependents()
    pipe = make_pipe(k_matrix, v_matrix, shape.keys, shape.head_dim, STAGES, 1)
    if OVERLAP and not (EARLY or KEYS_ARE_OLD):
        gdc_wait()
    tiles_per_program = gl.load(run.schedule)
    now, order = start_run(run, tiles_per_program, num_sequences, shape)
    source = (k_matrix, v_matrix, places, cache)
    ahead = look_ahead(source, run, now, order, shape)
    for _ in gl.static_range(STAGES - 1):
        if KEYS_ARE_OLD:  # noqa: SIM102  (decided when compiled)
            # Only the first of these calls can wait.
            if holds_newest_key(run, ahead, shape):
                gdc_wait()
        ahead = fetch(source, run, ahead, order, pipe, shape)
    if KEYS_ARE_OLD:
        gdc_wait()
    done = now.at * 0
    while done < order.num_tiles:
        top, total, values, ahead = _attend_piece(
            queries, run, now, done, ahead, order, source, score, pipe, shape, ROWS, CAUSAL
        )
        _finish_piece(queries, run, now, tiles_per_program, top, total, values, shape, MERGED_ROWS)
        done += now.left
        now = next_piece(run, now, order, shape)
    _clear(queries, run.units, cu_seqlens_q, num_sequences, num_rows, shape)
    if EARLY and gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def _attend_piece(
    queries, run, now, done, ahead, order, source, score, pipe, shape, ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attend the piece at the cursor, which begins at the program's tile `done`; start one copy per tile.

    Scores are [keys, rows] and values [dimensions, rows]: transposed, so that 8 rows already fill a product.
    The scores of the next tile run beside the softmax and the values of this one.

    Returns:
        (top [R], total [R], values [D, R]) float32, a running softmax; the next `ahead` of fetch.
    """
    D: gl.constexpr = shape.head_dim
    MMA: gl.constexpr = _MMA
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    MASKED: gl.constexpr = CAUSAL or shape.windowed or shape.begins
    record = run.units + now.unit * RECORD
    CUT: gl.constexpr = shape.windowed or shape.begins
    kv_begin, kv_end = gl.load(record + 3) if CUT else 0, gl.load(record + 4)
    q = _load_queries(queries, record, now.kv_head, shape, ROWS, gl.DotOperandLayout(1, MMA, 2))
    token, valid = _tokens(record, shape, ROWS, ROW)
    position = gl.load(queries.positions + token, mask=valid, other=-1)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([ROWS], 0.0, gl.float32, layout=ROW)
    values = gl.zeros([D, ROWS], gl.float32, layout=MMA)
    s = _scores(q, pipe, done, shape, ROWS)
    for i in range(0, now.left - 1):
        # The copy overwrites the buffer of the previous tile, whose reads are done.
        ahead = fetch(source, run, ahead, order, pipe, shape)
        next_s = _scores(q, pipe, done + i + 1, shape, ROWS)
        if MASKED:
            s = _mask(s, (now.tile + i) * shape.keys, position, kv_begin, kv_end, score, shape)
        weights, top, total, shrink = _softmax(s, top, total, score.factor, MASKED)
        v = _values(pipe, done + i)
        if CUT:
            v = _clear_before(v, (now.tile + i) * shape.keys, kv_begin, shape)
        values = _add_values(values, v, weights, shrink)
        s = next_s
    ahead = fetch(source, run, ahead, order, pipe, shape)
    start = (now.tile + now.left - 1) * shape.keys
    s = _mask(s, start, position, kv_begin, kv_end, score, shape)
    weights, top, total, shrink = _softmax(s, top, total, score.factor, True)
    v = _values(pipe, done + now.left - 1)
    if CUT:
        v = _clear_before(v, start, kv_begin, shape)
    # Memory that was never written may hold NaN, and 0 * NaN is NaN.
    if kv_end - start < shape.keys:
        key = start + gl.arange(0, shape.keys, layout=gl.SliceLayout(0, v.type.layout))
        v = gl.where((key < kv_end)[None, :], v, 0.0)
    values = _add_values(values, v, weights, shrink)
    return top, total, values, ahead


@gluon.jit
def _scores(q, pipe, number, shape, ROWS: gl.constexpr):
    """Wait for the keys of the run's tile `number`; return their products with the queries [KEYS, R]."""
    MMA: gl.constexpr = q.type.layout.parent
    stage, phase = number % pipe.stages, (number // pipe.stages) & 1
    mbarrier.wait(pipe.k_filled.index(stage), phase)
    k = pipe.k.index(stage).load(gl.DotOperandLayout(0, MMA, 2))
    return mma_v2(k, q, gl.zeros([shape.keys, ROWS], gl.float32, layout=MMA))


@gluon.jit
def _values(pipe, number):
    """Wait for the values of the run's tile `number`; return them as the left operand [D, KEYS]."""
    stage, phase = number % pipe.stages, (number // pipe.stages) & 1
    mbarrier.wait(pipe.v_filled.index(stage), phase)
    return pipe.v.index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, _MMA, 2))


@gluon.jit
def _clear_before(v, start, kv_begin, shape):
    """Zero the values [D, KEYS] of the tile from key `start` on that lie before the unit's first key."""
    if start < kv_begin:
        key = start + gl.arange(0, shape.keys, layout=gl.SliceLayout(0, v.type.layout))
        v = gl.where((key >= kv_begin)[None, :], v, 0.0)
    return v


@gluon.jit
def _add_values(values, v, weights, shrink):
    """Shrink the sum [D, R] and add a tile's values v [D, KEYS], weighted [KEYS, R]."""
    operand = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(1, weights.type.layout, 2))
    return mma_v2(v, operand, values * shrink[None, :])


@gluon.jit
def _mask(s, start, position, kv_begin, kv_end, score, shape):
    """Mask the scores [KEYS, R] of keys that a row does not see; `start` is the tile's first key."""
    key = start + gl.arange(0, shape.keys, layout=gl.SliceLayout(1, s.type.layout))
    visible = (key[:, None] <= position[None, :]) & (key < kv_end)[:, None]
    if shape.windowed:
        visible = visible & (key[:, None] > position[None, :] - score.window)
    if shape.begins:
        visible = visible & (key >= kv_begin)[:, None]
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _softmax(s, top, total, factor, MASKED: gl.constexpr):
    """Fold a tile's scores [KEYS, R] into the maximum and sum: (weights, top, total, shrink)."""
    new_top = gl.maximum(top, gl.max(s, 0) * factor)
    base = new_top
    if MASKED:
        # A row without a visible key so far keeps top = -inf; base 0 makes its weights exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * factor - base[None, :])
    shrink = gl.exp2(top - base)
    return weights, new_top, total * shrink + gl.sum(weights, 0), shrink


@gluon.jit
def _tokens(record, shape, ROWS: gl.constexpr, ROW: gl.constexpr):
    """Return each row's token [R] int64, and whether it exists [R]."""
    row = gl.arange(0, ROWS, layout=ROW)
    token = gl.load(record + 1) + row // shape.group
    return token.to(gl.int64), row < gl.load(record + 2) * shape.group


@gluon.jit
def _load_queries(queries, record, kv_head, shape, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the unit's queries [D, R] as the right operand of a product."""
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    token, valid = _tokens(record, shape, ROWS, ROW)
    head = kv_head * shape.group + gl.arange(0, ROWS, layout=ROW) % shape.group
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(1, LAYOUT))
    pointers = queries.q + (token * queries.token + head * queries.head)[None, :] + d[:, None]
    return gl.load(pointers, mask=valid[None, :], other=0.0)


@gluon.jit
def _finish_piece(queries, run, now, tiles_per_program, top, total, values, shape, MERGED_ROWS: gl.constexpr):
    """Write a piece's rows to the results if it is the only piece of its (unit, kv head), else as a partial.

    The program that stores the last partial of a (unit, kv head) merges them all; see decode_runs.py.
    """
    MMA: gl.constexpr = values.type.layout
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    record = run.units + now.unit * RECORD
    head_begin = now.at - (now.tile - now.first_tile)
    ROWS: gl.constexpr = values.shape[1]
    row = gl.arange(0, ROWS, layout=ROW)
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(1, MMA))
    token, valid = _tokens(record, shape, ROWS, ROW)
    safe = gl.where(total == 0, 1.0, total)
    out = values / safe[None, :]
    lse = gl.where(total == 0, float("-inf"), (top + gl.log2(safe)) * LN_2)
    if now.left == now.num_tiles:
        at = token * (shape.group * shape.kv_heads) + now.kv_head * shape.group + row % shape.group
        final = queries.out + (at * shape.head_dim)[None, :] + d[:, None]
        gl.store(final, out.to(queries.out.dtype.element_ty), mask=valid[None, :])
        gl.store(queries.lse + at, lse, mask=valid)
    else:
        first_program = head_begin // tiles_per_program
        num_pieces = (head_begin + now.num_tiles - 1) // tiles_per_program - first_program + 1
        place = partial_id(now.at, tiles_per_program) * shape.rows + row
        partial = run.partial_out + (place * shape.head_dim)[None, :] + d[:, None]
        gl.store(partial, out, mask=valid[None, :])
        gl.store(run.partial_lse + place, lse, mask=valid)
        debug_barrier()
        counter = run.arrivals + now.unit * shape.kv_heads + now.kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_pieces - 1:
            # The counter is reset for the next layer, whose kernel waits until this one has ended.
            gl.store(counter, 0)
            merge_pieces(
                queries, run, record, now.kv_head, head_begin, first_program, num_pieces,
                tiles_per_program, shape, MERGED_ROWS,
            )  # fmt: skip


@gluon.jit
def _clear(queries, units, cu_seqlens_q, num_sequences, num_rows, shape):
    """Write out 0 and lse -inf to tokens of units without keys, and to rows that no sequence covers."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    for unit in range(program, num_sequences, num_programs):
        record = units + unit * RECORD
        num_tokens = gl.where(gl.load(record + 4) <= gl.load(record + 3), gl.load(record + 2), 0)
        _clear_tokens(queries, gl.load(record + 1), num_tokens, 0, 1, shape)
    num_covered = gl.load(cu_seqlens_q + num_sequences)
    _clear_tokens(queries, num_covered, num_rows - num_covered, program, num_programs, shape)


@gluon.jit
def _clear_tokens(queries, token_begin, num_tokens, first, step, shape):
    """Clear every `step`-th (token, head) row of the tokens, starting with row `first`."""
    WIDTH: gl.constexpr = shape.group * shape.kv_heads
    d = gl.arange(0, shape.head_dim, layout=gl.BlockedLayout([1], [32], [1], [0]))
    zero = gl.full([shape.head_dim], 0.0, queries.out.dtype.element_ty, layout=d.type.layout)
    for index in range(first, num_tokens * WIDTH, step):
        at = token_begin.to(gl.int64) * WIDTH + index
        gl.store(queries.out + at * shape.head_dim + d, zero)
        gl.store(queries.lse + at, float("-inf"))
