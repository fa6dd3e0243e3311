"""Which key tiles a program of tma_decode.py works on, in which order, and how copies run ahead.

    all tiles, unit by unit and head by head; schedule = [tiles of a run, tiles in all, each run's first unit]

      unit 0, head 0 | unit 0, head 1 | unit 1, head 0     | unit 1, head 1     | ...
      |-- run of program 0 --|-- run of program 1 --|-- run of program 2 --| ...

    one run               begin            middle   end
                            | piece | piece | piece | piece |
    order of attention          2       3       4       1      1: the piece that the run's end cuts, if any

    two cursors over it     now     the piece that the warp attends
                            ahead   the tile that TMA copies next, up to STAGES - 1 tiles before its use

                            fetch: copy tile (k, v) -> k_filled, v_filled of stage `fetched % STAGES`
                                   load the block ids of the tile after it, for the next call

The warp, its buffers and its barriers are in tma_decode.py.

A (unit, kv head) whose key tiles lie in the runs of several programs is merged by the last of them:

    (unit, head)   |----a----|--------b--------|--c--|
    run            |-----0-----|-----1-----|----2----|       b is in three pieces

    program 0, 1, 2:  store the piece's (out, lse) in its partial result
                      thread barrier
                      atomic_add(arrivals[b], 1)             old value 0 or 1: go on with the next piece
                                                             old value 2:      merge the three, set it to 0

    partial results   | 2 * program: piece at the run's begin | 2 * program + 1: piece after it |

A run has at most two pieces that other programs share: its first and its last. So two partial results for
each program suffice. There is no mbarrier and no shared memory here: the programs run on different SMs, and
the counter's acquire and release order what they wrote. Pieces are merged in their order, whichever came
last, so the result does not depend on timing.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.attention.hopper.pipe import Source, block_id, copy_part, expect_tile
from octavo.attention.triton.step_map import RECORD
from octavo.kernels.launch import number_of

# Partial results that are loaded side by side, times their rows.
_ROWS_IN_FLIGHT = gl.constexpr(8)


class Run(NamedTuple):
    """The schedule, and the memory that programs share; the fields of DecodeWork."""

    units: Any
    schedule: Any
    arrivals: Any
    partial_out: Any
    partial_lse: Any


@gluon.jit
def partial_id(at, tiles_per_program):
    """Number of the partial result of the piece that starts at tile `at`; see the picture above."""
    return 2 * (at // tiles_per_program) + (at % tiles_per_program != 0).to(gl.int32)


@gluon.jit
def merge_pieces(
    queries, run, record, kv_head, head_begin, first_program, num_pieces,
    tiles_per_program, shape, ROWS: gl.constexpr,
):  # fmt: skip
    """Merge the pieces of one (unit, kv head) in order and write its rows, of which at most ROWS exist.

    Specification: octavo.attention.merge. It is a function of its own because the warp that attended the last
    piece merges at once, with layouts of one warp: another launch would cost more than the merge.
    """
    D: gl.constexpr = shape.head_dim
    # Wider rows are fewer.
    IN_FLIGHT: gl.constexpr = _ROWS_IN_FLIGHT * 128 // D if D > 128 else _ROWS_IN_FLIGHT
    CHUNK: gl.constexpr = IN_FLIGHT // ROWS if ROWS < IN_FLIGHT else 1
    LANES: gl.constexpr = D // 4 if D <= 128 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    token_begin, num_tokens = gl.load(record + 1), gl.load(record + 2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PARTS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    valid = row < num_tokens * shape.group
    head = kv_head * shape.group + row % shape.group
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, PARTS))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(0, PARTS))
    values = gl.zeros([ROWS, D], gl.float32, layout=OUT)
    for begin in range(0, num_pieces, CHUNK):
        piece = begin + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PARTS))
        start = gl.where(piece == 0, head_begin, (first_program + piece) * tiles_per_program)
        place = (partial_id(start, tiles_per_program) * shape.rows)[:, None] + row[None, :]
        mask = (piece < num_pieces)[:, None] & valid[None, :]
        lse = gl.load(run.partial_lse + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        partial = run.partial_out + (place * D)[:, :, None] + d[None, :][None, :, :]
        out = gl.load(partial, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        top, total, values = _fold(top, total, values, out, lse)
    safe = gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, float("-inf"), top + gl.log(safe))
    at = (token_begin + row // shape.group).to(gl.int64) * (shape.group * shape.kv_heads) + head
    gl.store(queries.lse + at, lse, mask=valid)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    at, safe, valid = gl.convert_layout(at, ROW), gl.convert_layout(safe, ROW), gl.convert_layout(valid, ROW)
    out = (values / safe[:, None]).to(queries.out.dtype.element_ty)
    gl.store(queries.out + (at * D)[:, None] + d[None, :], out, mask=valid[:, None])


@gluon.jit
def _fold(top, total, values, out, lse):
    """Fold partial results out [P, R, D], lse [P, R] (natural log) into the state of a running softmax.

    As triton.tiles.fold_partials, in natural logs and with Gluon's explicit layouts.
    """
    new_top = gl.maximum(top, gl.max(lse, 0))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp(lse - base[None, :])
    shrink = gl.exp(top - base)
    total = total * shrink + gl.sum(weights, 0)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, values.type.layout))
    values = values * shrink[:, None] + gl.sum(weights[:, :, None] * out, 0)
    return new_top, total, values


class Cursor(NamedTuple):
    """Where a program is in its run: at tile `at` of all tiles, which is tile `tile` of a sequence's keys.

    unit, kv_head: what the tile belongs to.
    left: tiles of this (unit, kv head) that remain in the run, this one included; 0 after the last one.
    first_tile, num_tiles: the unit's tiles among those of the sequence's keys.
    """

    at: Any
    unit: Any
    kv_head: Any
    tile: Any
    left: Any
    first_tile: Any
    num_tiles: Any


class Order(NamedTuple):
    """The order in which a program attends its run, tiles begin : end of all.

    If the run's end cuts a (unit, kv head), that piece, middle : end, comes first: it is shared with other
    programs, and its merge then happens while there is other work left. Else middle is end.
    first: the cursor at `begin`.
    """

    first: Any
    middle: Any
    end: Any
    num_tiles: Any


class Ahead(NamedTuple):
    """The next tile to be copied.

    cursor: where it lies; the cursor at which the program attends is behind it.
    blocks: the ids of its blocks.
    fetched: tiles copied so far.
    """

    cursor: Any
    blocks: Any
    fetched: Any


@gluon.jit
def start_run(run, tiles_per_program, num_sequences, shape):
    """Return the cursor at the first tile that the program attends, and the order of its run."""
    num_all = gl.load(run.schedule + 1)
    begin = gl.minimum(gl.program_id(0) * tiles_per_program, num_all)
    end = gl.minimum(begin + tiles_per_program, num_all)
    # An empty run at the end of all tiles would name a unit after the last one.
    units = run.schedule + 2 + gl.program_id(0)
    first = _begin(run, begin, end, gl.minimum(gl.load(units), num_sequences - 1), shape)
    # The unit at the run's end, if tiles follow.
    last_unit = gl.load(units + 1, mask=end < num_all, other=0)
    after = _begin(run, end, end, last_unit, shape)
    last = Cursor(
        end - after.tile + after.first_tile, after.unit, after.kv_head, after.first_tile,
        after.tile - after.first_tile, after.first_tile, after.num_tiles,
    )  # fmt: skip
    is_cut = (end < num_all) & (last.at > begin) & (last.at < end)
    middle = gl.where(is_cut, last.at, end)
    at, unit, kv_head, tile, left, first_tile, num_tiles = first
    first = Cursor(at, unit, kv_head, tile, gl.minimum(left, middle - at), first_tile, num_tiles)
    order = Order(first, middle, end, end - begin)
    now = first
    if is_cut:
        now = last
    return now, order


@gluon.jit
def _begin(run, at, end, unit, shape):
    """Return the cursor at tile `at`, which belongs to `unit` or to one after it."""
    unit = _find_unit(run, at, end, unit)
    first_tile, num_tiles = _unit_tiles(run, unit, shape)
    unit_begin = gl.load(run.units + unit * RECORD + 7) - num_tiles * shape.kv_heads
    kv_head = (at - unit_begin) // num_tiles
    done = at - unit_begin - kv_head * num_tiles
    left = gl.minimum(num_tiles - done, end - at)
    return Cursor(at, unit, kv_head, first_tile + done, left, first_tile, num_tiles)


@gluon.jit
def next_piece(run, cursor, order, shape):
    """Return the cursor at the first tile of the piece that follows in the program's order."""
    at = cursor.at + cursor.left
    unit, first_tile, num_tiles = cursor.unit, cursor.first_tile, cursor.num_tiles
    kv_head = cursor.kv_head + 1
    if kv_head == shape.kv_heads:
        kv_head = 0
        unit = _find_unit(run, at, order.middle, unit)
        first_tile, num_tiles = _unit_tiles(run, unit, shape)
    left = gl.minimum(num_tiles, order.middle - at)
    following = Cursor(at, unit, kv_head, first_tile, left, first_tile, num_tiles)
    if at == order.end:
        following = order.first
    return following


@gluon.jit
def _find_unit(run, at, end, unit):
    """Return the unit of tile `at`, searched from `unit` on, or `unit` if not at < end.

    Units without keys are skipped.
    """
    while (at < end) & (gl.load(run.units + unit * RECORD + 7) <= at):
        unit += 1
    return unit


@gluon.jit
def _unit_tiles(run, unit, shape):
    """Return the first tile of a unit's keys, and the number of its tiles."""
    record = run.units + unit * RECORD
    first_tile = gl.load(record + 3) // shape.keys
    # The number is at least 1, since callers divide by it: past the run's end the record may be of any unit.
    return first_tile, gl.maximum(1, gl.cdiv(gl.load(record + 4), shape.keys) - first_tile)


@gluon.jit
def _blocks(source, run, cursor, exists, shape):
    """Load the block ids of the parts of a cursor's tile; 0, and nothing is read, if it does not exist."""
    k_matrix, v_matrix, places, cache = source
    record = run.units + cursor.unit * RECORD
    table = cache.table + gl.load(record).to(gl.int64) * number_of(cache.table_row)
    # Without a tile the record may be an unused one, which holds anything; no key is below this end.
    kv_end = gl.where(exists, gl.load(record + 4), -0x80000000)
    sequence = Source(k_matrix, v_matrix, places, table, kv_end)
    blocks = ()
    for part in gl.static_range(shape.keys // k_matrix.block_type.shape[0]):
        blocks = blocks + (block_id(sequence, cursor.tile, part, shape, shape.keys),)  # noqa: RUF005
    return blocks


@gluon.jit
def look_ahead(source, run, now, order, shape):
    """Return the first `ahead` of fetch: copies begin at the cursor."""
    return Ahead(now, _blocks(source, run, now, order.num_tiles > 0, shape), now.at * 0)


@gluon.jit
def holds_newest_key(run, ahead, shape):
    """Return whether the next tile to be copied is the last one of its unit's keys."""
    kv_end = gl.load(run.units + ahead.cursor.unit * RECORD + 4)
    return (ahead.cursor.tile + 1) * shape.keys >= kv_end


@gluon.jit
def fetch(source, run, ahead, order, pipe, shape):
    """Start the copy of the next tile, if the run has one; return the `ahead` of the next call.

    It also loads the block ids of the tile after that one, so that the next call need not wait for them.
    """
    cursor, blocks, fetched = ahead
    if fetched < order.num_tiles:
        k_matrix, v_matrix, places, _ = source
        tile, kv_head, stage = cursor.tile, cursor.kv_head, fetched % pipe.stages
        k, k_filled = pipe.k.index(stage), pipe.k_filled.index(stage)
        v, v_filled = pipe.v.index(stage), pipe.v_filled.index(stage)
        expect_tile(k, k_filled)
        for part in gl.static_range(len(blocks)):
            copy_part(k_matrix, places, blocks[part], tile, part, kv_head, k_filled, k, shape)
        expect_tile(v, v_filled)
        for part in gl.static_range(len(blocks)):
            copy_part(v_matrix, places, blocks[part], tile, part, kv_head, v_filled, v, shape)
        fetched += 1
        at, unit, kv_head, tile, left, first_tile, num_tiles = cursor
        cursor = Cursor(at + 1, unit, kv_head, tile + 1, left - 1, first_tile, num_tiles)
        if left == 1:
            cursor = next_piece(run, cursor, order, shape)
        blocks = _blocks(source, run, cursor, fetched < order.num_tiles, shape)
    return Ahead(cursor, blocks, fetched)
