"""Shared nodes: keys that many sequences share, read once for the queries of all of them.

    nodes    queries gathered from many sequences  x  a segment of shared keys  ->  partial results
    leaves   a sequence's queries  x  its own keys                              ->  one more partial result
    merge    a token's partial results  ->  its result

Tensor cores bound nodes with many queries, memory bandwidth bounds leaves. So on Hopper and later they
overlap: each kernel is launched early, and waits where it needs earlier results (programmatic dependent
launch). One program of each kernel waits for the previous kernel, so that no kernel ends before those
launched earlier.

Source of the idea: Juravsky et al., "Hydragen", 2024; Ye et al., "ChunkAttention", 2024.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape, padded_head_dim
from octavo.attention.triton.kernel_call import Call, make_call
from octavo.attention.triton.step_map import RECORD
from octavo.attention.triton.tiles import (
    LN_2,
    LOG2_E,
    attend_tiles,
    empty_state,
    fold_partials,
    load_queries,
    load_slopes,
    normalise,
    store_results,
)
from octavo.kernels.device import can_overlap, power_of_two
from octavo.kernels.launch import launch

# Heads that a program of one warp merges. Four warps with 8 heads took three times as long.
_MERGED_HEADS = 2


def node_call(
    q: Tensor, layer: LayerCache, positions: Tensor, options: ScoreOptions, forest: DeviceForest
) -> Call:
    """Make the arguments of the node kernels: they read the plan's block ids and write its partial results.

    Arguments as for make_call; options have the forest's window.
    """
    results = (forest.partial_out, forest.partial_lse)
    return make_call(q, layer, positions, forest.node_table, options, results)


def attend_fat_nodes(call: Call, forest: DeviceForest, *, decodes: bool) -> None:
    """Attend the shared nodes that have many query tokens, and write their partial results.

    Args:
        call: see node_call.
        forest: the plan.
        decodes: no sequence has more than one query token. Then no key of a node was stored in this step.
            (Prompts with a common prefix share blocks in the same step that computes them.)
    """
    # It is not launched early: at once it needs the queries, which the previous kernel writes.
    tile = forest.fat_tile(decodes=decodes)
    _launch(call, forest, tile, forest.fat_units, forest.num_fat_units, early=False)


def attend_thin_nodes(call: Call, forest: DeviceForest) -> None:
    """Attend the shared nodes that have few query tokens, and write their partial results.

    Launch it after attend_fat_nodes, which lets this kernel start only when queries and keys are written.
    """
    early = can_overlap(call.q.device)
    _launch(call, forest, forest.thin_shape, forest.thin_units, forest.num_thin_units, early=early)


def _launch(
    call: Call, forest: DeviceForest, tile: TileShape, units: Tensor, count: Tensor, *, early: bool
) -> None:
    launch(
        _attend_nodes_kernel,
        (forest.num_programs(tile),),
        queries=call.queries, cache=call.cache, score=call.score, units=units, count=count,
        tokens=forest.tokens, partial_ids=forest.partial_ids, num_rows=call.q.shape[0],
        shape=call.shape(tile), OVERLAPS=can_overlap(call.q.device),
        launch_pdl=early, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _attend_nodes_kernel(
    queries, cache, score, units, count, tokens, partial_ids, num_rows, shape, OVERLAPS: tl.constexpr
):
    """Attend the (unit, kv head)s of this program's turns; without a window, each query sees all keys."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items = tl.load(count) * shape.kv_heads
    row = tl.arange(0, shape.rows)
    for turn in range(0, tl.cdiv(num_items - program, num_programs)):
        item = program + turn * num_programs
        record = units + item // shape.kv_heads * RECORD
        kv_head = item % shape.kv_heads
        entry = tl.load(record + 1) + row // shape.group
        kv_begin, kv_end = tl.load(record + 3), tl.load(record + 4)
        valid = row < tl.load(record + 2) * shape.group
        token = tl.load(tokens + entry, mask=valid, other=0).to(tl.int64)
        head = kv_head * shape.group + row % shape.group
        # The plan may name rows of sequences that have ended and left the batch.
        exists = valid & (token < num_rows)
        q = load_queries(queries, token, head, exists, shape)
        position = tl.load(queries.positions + token, mask=exists, other=-1)
        slope = load_slopes(score, position, tl.load(record), head, valid, shape)
        tile, tile_end = kv_begin // shape.keys, kv_end // shape.keys
        top, total, values = empty_state(shape)
        if shape.windowed:
            full = tl.minimum(tile_end, tl.cdiv(tl.load(record + 5), shape.keys))
            top, total, values = attend_tiles(
                top, total, values, q, position, slope, cache, tl.load(record), kv_head,
                tile, full, kv_begin, kv_end, score, shape, True,
            )  # fmt: skip
            tile = full
        top, total, values = attend_tiles(
            top, total, values, q, position, slope, cache, tl.load(record), kv_head,
            tile, tile_end, kv_begin, kv_end, score, shape, False,
        )  # fmt: skip
        out, lse = normalise(top, total, values)
        partial = tl.load(partial_ids + entry, mask=valid, other=0).to(tl.int64)
        store_results(queries, partial, head, valid, out, lse, shape)
    if OVERLAPS and program == 0:
        tl.extra.cuda.gdc_wait()


def merge_nodes(results: tuple[Tensor, Tensor], forest: DeviceForest) -> None:
    """Merge the partial results of nodes and leaves into (out [T, H, D], lse [T, H] float32), contiguous.

    A token without own keys, as in the row of a sequence that has ended, gets out 0 and lse -inf.
    """
    out, lse = results
    num_tokens, num_heads, head_dim = out.shape
    heads = min(_MERGED_HEADS, power_of_two(num_heads))
    overlaps = can_overlap(out.device)
    launch(
        _merge_kernel,
        (num_tokens, -(-num_heads // heads)),
        out_ptr=out, lse_ptr=lse, leaf_out=forest.leaf_out, leaf_lse=forest.leaf_lse,
        partial_out=forest.partial_out, partial_lse=forest.partial_lse, merge_begin=forest.merge_begin,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEADS=heads, PADDED_DIM=padded_head_dim(head_dim),
        OVERLAPS=overlaps,
        launch_pdl=overlaps, num_warps=1,
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, leaf_out, leaf_lse, partial_out, partial_lse, merge_begin,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge some heads of a token: its nodes' partial results from the root down, then its leaf's.

    Specification: octavo.attention.merge. A separate kernel, because nodes and leaves come from different
        ones.
    """
    CHUNK: tl.constexpr = 4
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, PADDED_DIM)
    valid = head < NUM_HEADS
    in_head = valid[:, None] & (d < HEAD_DIM)[None, :]
    begin, end = tl.load(merge_begin + token), tl.load(merge_begin + token + 1)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = token * NUM_HEADS + head
    own_lse = tl.load(leaf_lse + at, mask=valid, other=float("-inf"))
    own_out = tl.load(leaf_out + (at * HEAD_DIM)[:, None] + d[None, :], mask=in_head, other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    for first in range(begin, end, CHUNK):
        partial = (first + tl.arange(0, CHUNK)).to(tl.int64)
        part = partial[:, None] * NUM_HEADS + head[None, :]
        mask = (partial < end)[:, None] & valid[None, :]
        lse = tl.load(partial_lse + part, mask=mask, other=float("-inf"))
        pointers = partial_out + (part * HEAD_DIM)[:, :, None] + d[None, None, :]
        out = tl.load(pointers, mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)
        top, total, values = fold_partials(top, total, values, out, lse * LOG2_E)
    top, total, values = fold_partials(top, total, values, own_out[None, :, :], own_lse[None, :] * LOG2_E)
    total = tl.where(own_lse == float("-inf"), 0.0, total)
    out, lse = normalise(top, total, values)
    out = tl.where((total == 0)[:, None], 0.0, out).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (at * HEAD_DIM)[:, None] + d[None, :], out, mask=in_head)
    tl.store(lse_ptr + at, lse * LN_2, mask=valid)
