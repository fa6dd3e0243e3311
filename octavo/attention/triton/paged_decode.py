"""Decode: few query rows per sequence, bound by memory bandwidth."""

import triton
import triton.language as tl

from octavo.attention.metadata import AttentionMetadata
from octavo.attention.triton.kernel_call import Call, DecodeWork
from octavo.attention.triton.step_map import RECORD, num_key_tiles
from octavo.attention.triton.tiles import (
    attend_tiles,
    clear_tokens,
    empty_state,
    fold_partials,
    load_queries,
    load_slopes,
    normalise,
    store_results,
    tile_rows,
)
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlaps, start_next, wait_for_previous

# Numbers that a program merges at a time.
_MERGED_VALUES = tl.constexpr(8192)


def attend_decode(call: Call, metadata: AttentionMetadata, work: DecodeWork, *, early: bool) -> None:
    """Attend the decode units and write their rows of the results; clear rows that no sequence covers.

    early: do not wait for the previous kernel. It must let this one start only when queries can be read.
    """
    tile = work.shape
    overlap = overlaps(call.q)
    keys_are_old = metadata.keys_are_old and overlap and not early
    shape = call.shape(tile)
    most_rows = power_of_two(min(tile.rows, metadata.max_query_len * shape.group.value))
    launch(
        _attend_decode_kernel,
        (work.schedule.shape[0] - 2,),
        queries=call.queries, cache=call.cache, score=call.score, units=work.units, schedule=work.schedule,
        arrivals=work.arrivals, partial_out=work.partial_out, partial_lse=work.partial_lse,
        cu_seqlens_q=metadata.cu_seqlens_q, num_sequences=metadata.seq_lens.shape[0],
        num_rows=call.q.shape[0], shape=shape, MERGED_ROWS=most_rows, OVERLAP=overlap,
        EARLY=early and overlap, KEYS_ARE_OLD=keys_are_old,
        launch_pdl=overlap, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences", "num_rows"])
def _attend_decode_kernel(
    queries, cache, score, units, schedule, arrivals, partial_out, partial_lse,
    cu_seqlens_q, num_sequences, num_rows, shape, MERGED_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
    EARLY: tl.constexpr, KEYS_ARE_OLD: tl.constexpr,
):  # fmt: skip
    """Work through one run of key tiles, (unit, kv head) after (unit, kv head).

        (unit, head)   |----a----|--------b--------|--c--|
        program        |-----0-----|-----1-----|----2----|      b is in three pieces; 2 holds all of c

    The program that finishes the last piece of a (unit, head) merges its pieces in order, so the result does
    not depend on timing. Units without keys, of which a padded batch has many, are skipped.
    """
    # With a single sequence it measured slower, see docs/log/attention.md.
    if (num_sequences > 1) | EARLY:
        start_next(OVERLAP)
    if not (EARLY or KEYS_ARE_OLD):
        wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    tiles_per_program = tl.load(schedule)
    at = program * tiles_per_program
    end = tl.minimum(at + tiles_per_program, tl.load(schedule + 1))
    unit = tl.load(schedule + 2 + program)
    if KEYS_ARE_OLD:
        wait_for_previous(OVERLAP)
    while at < end:
        at = _attend_piece(
            queries, cache, score, units, unit, arrivals, partial_out, partial_lse,
            at, end, tiles_per_program, shape, MERGED_ROWS,
        )  # fmt: skip
        while (at < end) & (tl.load(units + unit * RECORD + 7) <= at):
            unit += 1
    start_next(OVERLAP)
    num_programs = tl.num_programs(0)
    for empty in range(program, num_sequences, num_programs):
        record = units + empty * RECORD
        num_tokens = tl.where(tl.load(record + 4) <= tl.load(record + 3), tl.load(record + 2), 0)
        clear_tokens(queries, tl.load(record + 1), num_tokens, 0, 1, shape)
    num_covered = tl.load(cu_seqlens_q + num_sequences)
    clear_tokens(queries, num_covered, num_rows - num_covered, program, num_programs, shape)
    if EARLY and program == 0:
        wait_for_previous(OVERLAP)


@triton.jit
def _attend_piece(
    queries, cache, score, units, unit, arrivals, partial_out, partial_lse,
    at, end, tiles_per_program, shape, MERGED_ROWS: tl.constexpr,
):  # fmt: skip
    """Attend from tile `at` to the end of the run or of its (unit, kv head); returns where it stopped."""
    record = units + unit * RECORD
    token_begin, num_tokens = tl.load(record + 1), tl.load(record + 2)
    kv_begin, kv_end = tl.load(record + 3), tl.load(record + 4)
    num_tiles = num_key_tiles(kv_begin, kv_end, shape.keys)
    unit_begin = tl.load(record + 7) - num_tiles * shape.kv_heads
    kv_head = (at - unit_begin) // num_tiles
    head_begin = unit_begin + kv_head * num_tiles
    first_tile = at - head_begin
    last_tile = tl.minimum(num_tiles, end - head_begin)

    token, head, valid = tile_rows(token_begin, num_tokens, kv_head, shape)
    q = load_queries(queries, token, head, valid, shape)
    position = tl.load(queries.positions + token, mask=valid, other=-1)
    slope = load_slopes(score, position, tl.load(record), head, valid, shape)
    tile_begin = kv_begin // shape.keys
    top, total, values = attend_tiles(
        *empty_state(shape), q, position, slope, cache, tl.load(record), kv_head,
        tile_begin + first_tile, tile_begin + last_tile, kv_begin, kv_end, score, shape, True,
    )  # fmt: skip
    out, lse = normalise(top, total, values)
    if (first_tile == 0) & (last_tile == num_tiles):
        store_results(queries, token, head, valid, out, lse, shape)
    else:
        store_piece(partial_out, partial_lse, partial_id(at, tiles_per_program), valid, out, lse, shape)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + unit * shape.kv_heads + kv_head, 1, sem="acq_rel", scope="gpu")
        first_program = head_begin // tiles_per_program
        num_pieces = (head_begin + num_tiles - 1) // tiles_per_program - first_program + 1
        if arrived == num_pieces - 1:
            # The counter is reset for the next layer, whose kernel waits until this one has ended.
            tl.store(arrivals + unit * shape.kv_heads + kv_head, 0)
            _merge_pieces(
                queries, partial_out, partial_lse, head_begin, first_program, num_pieces,
                tiles_per_program, token_begin, num_tokens, kv_head, shape, MERGED_ROWS,
            )  # fmt: skip
    return head_begin + last_tile


@triton.jit
def partial_id(at, tiles_per_program):
    """Return the number of a piece's partial result: one for a run's first piece, one for its last."""
    return 2 * (at // tiles_per_program) + (at % tiles_per_program != 0).to(tl.int32)


@triton.jit
def store_piece(partial_out, partial_lse, number, valid, out, lse, shape):
    """Store a piece's rows out [R, D], lse [R] in units of log 2 as the partial result of a number."""
    row = number * shape.rows + tl.arange(0, shape.rows)
    d = tl.arange(0, shape.padded_value_dim)
    tl.store(partial_out + (row * shape.padded_value_dim)[:, None] + d[None, :], out, mask=valid[:, None])
    tl.store(partial_lse + row, lse, mask=valid)


@triton.jit
def _merge_pieces(
    queries, partial_out, partial_lse, head_begin, first_program, num_pieces,
    tiles_per_program, token_begin, num_tokens, kv_head, shape, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one (unit, kv head) and write its rows; at most ROWS of the tile's rows exist.

    The program that attended the last piece calls it: for so few rows, another launch would cost more than
    the merge.
    """
    row = tl.arange(0, ROWS)
    token = (token_begin + row // shape.group).to(tl.int64)
    head = kv_head * shape.group + row % shape.group
    valid = row < num_tokens * shape.group
    top, total, values = _fold_pieces(
        partial_out, partial_lse, head_begin, first_program, num_pieces, tiles_per_program, valid, shape, ROWS
    )
    out, lse = normalise(top, total, values)
    store_results(queries, token, head, valid, out, lse, shape)


@triton.jit
def _fold_pieces(
    partial_out, partial_lse, head_begin, first_program, num_pieces, tiles_per_program, valid, shape,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Fold a (unit, kv head)'s pieces, in order, into a running softmax: (top [R], total [R], values [R, D]).

    Specification: octavo.attention.merge. About 64 rows of 128 numbers are in registers at a time.
    """
    CHUNK: tl.constexpr = max(2, min(32, _MERGED_VALUES // (ROWS * max(128, shape.padded_value_dim))))
    row = tl.arange(0, ROWS)
    d = tl.arange(0, shape.padded_value_dim)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, shape.padded_value_dim], tl.float32)
    for begin in range(0, num_pieces, CHUNK):
        piece = begin + tl.arange(0, CHUNK)
        at = tl.where(piece == 0, head_begin, (first_program + piece) * tiles_per_program)
        at_row = (partial_id(at, tiles_per_program) * shape.rows)[:, None] + row[None, :]
        mask = (piece < num_pieces)[:, None] & valid[None, :]
        pointers = partial_out + (at_row * shape.padded_value_dim)[:, :, None] + d[None, None, :]
        out = tl.load(pointers, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        lse = tl.load(partial_lse + at_row, mask=mask, other=float("-inf"), cache_modifier=".cg")
        top, total, values = fold_partials(top, total, values, out, lse)
    return top, total, values
