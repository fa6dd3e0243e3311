"""Which key tiles a program of hopper/decode.py works on, in which order, and how copies run ahead.

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

The warp, its buffers and its barriers are in decode.py. Nothing here waits.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.attention.hopper.pipe import Source, block_id, copy_part, expect_tile
from octavo.attention.triton.units import RECORD
from octavo.kernels.launch import number_of


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
def plan_run(run, tiles_per_program, num_sequences, shape):
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
    # At least 1, since others divide by it: past the run's end the record may be of any unit.
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
