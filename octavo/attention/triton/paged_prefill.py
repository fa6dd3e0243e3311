"""Prefill and extend: tiles of many query rows, bound by the tensor cores."""

import triton
import triton.language as tl

from octavo.attention.triton.kernel_call import Call, PrefillWork
from octavo.attention.triton.step_map import RECORD
from octavo.attention.triton.tiles import (
    attend_tiles,
    empty_state,
    load_queries,
    load_slopes,
    normalise,
    store_results,
    tile_rows,
)
from octavo.kernels.launch import launch

_MERGED_ROWS = 16


def attend_prefill(call: Call, work: PrefillWork) -> None:
    """Attend the prefill units and write their rows of the results."""
    tile = work.shape
    shape = call.shape(tile)
    num_rows, num_units, num_kv_heads = call.q.shape[0], work.units.shape[0], call.layer.k.shape[2]
    launch(
        _attend_prefill_kernel,
        (num_units * num_kv_heads * work.num_parts,),
        queries=call.queries, cache=call.cache, score=call.score, units=work.units,
        partial_out=work.partial_out, partial_lse=work.partial_lse, num_rows=num_rows, shape=shape,
        NUM_PARTS=work.num_parts,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip
    if work.num_parts > 1:
        launch(
            _merge_parts_kernel,
            (num_units, num_kv_heads, tile.rows // _MERGED_ROWS),
            queries=call.queries, units=work.units, partial_out=work.partial_out,
            partial_lse=work.partial_lse, num_rows=num_rows, NUM_PARTS=work.num_parts, shape=shape,
            ROWS=_MERGED_ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _attend_prefill_kernel(
    queries, cache, score, units, partial_out, partial_lse, num_rows, shape,
    NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Attend one (unit, kv head, part). Neighbouring programs read the same sequence through the L2 cache."""
    program = tl.program_id(0)
    part = program % NUM_PARTS
    kv_head = program // NUM_PARTS % shape.kv_heads
    record = units + program // (NUM_PARTS * shape.kv_heads) * RECORD
    num_tokens = tl.load(record + 2)
    if num_tokens == 0:
        return
    kv_begin, kv_end = tl.load(record + 3), tl.load(record + 4)
    tile_begin, tile_end = kv_begin // shape.keys, tl.cdiv(kv_end, shape.keys)
    if NUM_PARTS > 1:
        part_tiles = tl.cdiv(tile_end - tile_begin, NUM_PARTS)
        tile_begin = tl.minimum(tile_end, tile_begin + part * part_tiles)
        tile_end = tl.minimum(tile_end, tile_begin + part_tiles)
    token, head, valid = tile_rows(tl.load(record + 1), num_tokens, kv_head, shape)
    top, total, values = _attend_range(
        queries, cache, score, record, token, head, valid, kv_head,
        tile_begin, tile_end, shape,
    )  # fmt: skip
    out, lse = normalise(top, total, values)
    if NUM_PARTS > 1:
        row = (part * num_rows + token) * (shape.group * shape.kv_heads) + head
        d = tl.arange(0, shape.padded_value_dim)
        mask = valid[:, None] & (d < shape.value_dim)[None, :]
        tl.store(partial_out + (row * shape.value_dim)[:, None] + d[None, :], out, mask=mask)
        tl.store(partial_lse + row, lse, mask=valid)
    else:
        store_results(queries, token, head, valid, out, lse, shape)


@triton.jit
def _attend_range(
    queries, cache, score, record, token, head, valid, kv_head, tile_begin, tile_end, shape
):  # fmt: skip
    """Fold key tiles tile_begin : tile_end into a state, masking only those that some row sees in part."""
    kv_begin, kv_end = tl.load(record + 3), tl.load(record + 4)
    full_begin, full_end = tl.load(record + 5), tl.load(record + 6)
    full_tile_begin = tl.minimum(tile_end, tl.maximum(tile_begin, tl.cdiv(full_begin, shape.keys)))
    full_tile_end = tl.minimum(tile_end, tl.maximum(full_tile_begin, full_end // shape.keys))
    table_row = tl.load(record)
    q = load_queries(queries, token, head, valid, shape)
    position = tl.load(queries.positions + token, mask=valid, other=-1)
    slope = load_slopes(score, position, table_row, head, valid, shape)
    top, total, values = empty_state(shape)
    if shape.windowed or shape.begins:
        top, total, values = attend_tiles(
            top, total, values, q, position, slope, cache, table_row, kv_head,
            tile_begin, full_tile_begin, kv_begin, kv_end, score, shape, True,
        )  # fmt: skip
    top, total, values = attend_tiles(
        top, total, values, q, position, slope, cache, table_row, kv_head,
        full_tile_begin, full_tile_end, kv_begin, kv_end, score, shape, False,
    )  # fmt: skip
    return attend_tiles(
        top, total, values, q, position, slope, cache, table_row, kv_head,
        full_tile_end, tile_end, kv_begin, kv_end, score, shape, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _merge_parts_kernel(
    queries, units, partial_out, partial_lse, num_rows, NUM_PARTS: tl.constexpr, shape, ROWS: tl.constexpr
):
    """Merge the parts of ROWS rows of a (unit, kv head), in their order, and write the results.

    Specification: octavo.attention.merge. A separate kernel, because several programs compute the parts.
    There are many rows and few parts: folding one part at a time needs few registers.
    """
    record = units + tl.program_id(0) * RECORD
    kv_head = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    num_tokens = tl.load(record + 2)
    if tl.program_id(2) * ROWS >= num_tokens * shape.group:
        return
    valid = row < num_tokens * shape.group
    token = (tl.load(record + 1) + row // shape.group).to(tl.int64)
    head = kv_head * shape.group + row % shape.group
    d = tl.arange(0, shape.padded_value_dim)
    mask = valid[:, None] & (d < shape.value_dim)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, shape.padded_value_dim], tl.float32)
    for part in range(NUM_PARTS):
        at = (part * num_rows + token) * (shape.group * shape.kv_heads) + head
        lse = tl.load(partial_lse + at, mask=valid, other=float("-inf"))
        out = tl.load(partial_out + (at * shape.value_dim)[:, None] + d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, shrink = tl.exp2(lse - base), tl.exp2(top - base)
        total = total * shrink + weight
        values = values * shrink[:, None] + weight[:, None] * out
        top = new_top
    out, lse = normalise(top, total, values)
    store_results(queries, token, head, valid, out, lse, shape)
