# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
"""Shared nodes: keys that many sequences have in common, read once for the queries of all of them.

    nodes    queries gathered from many sequences  x  a segment of shared keys  ->  partial results
    leaves   a sequence's queries  x  its own keys, begun from the state that its partial results give

On Hopper and later each of these kernels is launched while the one before it still runs, and waits where it
needs results (programmatic dependent launch).

Source of the idea: Juravsky et al., "Hydragen", 2024; Ye et al., "ChunkAttention", 2024.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention import hopper_prefill
from octavo.attention.device_forest import DeviceForest
from octavo.attention.options import ScoreOptions
from octavo.attention.triton_arguments import constant, make_call
from octavo.attention.triton_shapes import TileShape, can_overlap
from octavo.attention.triton_tiles import (
    attend_tiles,
    fold_partials,
    load_queries,
    normalise,
    store_results,
)
from octavo.attention.triton_units import RECORD


class Ancestors(NamedTuple):
    """Partial results of each token's shared nodes, as the kernels that attend to leaves take them.

    `overlaps`, a tl.constexpr: the kernel may start before they are written.
    """

    merge_begin: Any
    out: Any
    lse: Any
    overlaps: Any


def ancestors_argument(forest: DeviceForest | None) -> Ancestors | None:
    """Describe a forest's results to a kernel; None, a constant, if there is no forest."""
    if forest is None:
        return None
    overlaps = constant(can_overlap(forest.device))
    return Ancestors(forest.merge_begin, forest.partial_out, forest.partial_lse, overlaps)


def attend_nodes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    options: ScoreOptions,
    forest: DeviceForest,
) -> None:
    """Attend to the shared nodes and write the forest's partial results.

    Args:
        q: [T, H, D] queries.
        k_cache, v_cache: [N, B, KH, D].
        positions: [T] int32.
        options: how scores are made; without a window.
        forest: the plan; its partial results are overwritten.
    """
    results = (forest.partial_out, forest.partial_lse)
    # A record's first field leads into the plan's own block ids.
    call = make_call(q, k_cache, v_cache, positions, forest.node_table, options, results)
    overlaps = can_overlap(q.device)

    def launch(tile: TileShape, units: Tensor, count: Tensor, *, early: bool) -> None:
        _attend_nodes_kernel[(forest.num_programs(tile),)](
            *(call.queries, call.cache, call.score, units, count, forest.tokens, forest.slots),
            *(q.shape[0], call.shape(tile), overlaps),
            launch_pdl=early,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )

    if hopper_prefill.can_attend_nodes(q, k_cache, v_cache, options, forest):
        hopper_prefill.attend_nodes(call, forest)
    else:
        # Needs what came before it, the queries, at once.
        launch(forest.fat_shape, forest.fat_units, forest.fat_count, early=False)
    launch(forest.thin_shape, forest.thin_units, forest.counts, early=overlaps)


@triton.jit(do_not_specialize=["num_rows"])
def _attend_nodes_kernel(
    queries, cache, score, units, count, tokens, slots, num_rows, shape, OVERLAPS: tl.constexpr
):
    """Attend the (unit, kv head)s of this program's turns; no key of a node is hidden from its queries."""
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
        # Rows that died may have left the batch.
        exists = valid & (token < num_rows)
        q = load_queries(queries, token, head, exists, shape)
        position = tl.load(queries.positions + token, mask=exists, other=-1)
        slope = position.to(tl.float32)
        if shape.biased:
            slope = tl.load(score.slopes + head, mask=valid, other=0.0)
        top, total, values = attend_tiles(
            tl.full([shape.rows], float("-inf"), tl.float32),
            tl.zeros([shape.rows], tl.float32),
            tl.zeros([shape.rows, shape.padded_dim], tl.float32),
            q, position, slope, cache, tl.load(record), kv_head,
            kv_begin // shape.keys, kv_end // shape.keys, kv_begin, kv_end, score, shape, False,
        )  # fmt: skip
        out, lse = normalise(top, total, values)
        slot = tl.load(slots + entry, mask=valid, other=0).to(tl.int64)
        store_results(queries, slot, head, valid, out, lse, shape)
    if OVERLAPS:
        # So that the end of this kernel means the end of the one before it too.
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_for_nodes(ancestors):
    """Wait until the partial results are written, if the kernel may have started before."""
    if ancestors.overlaps:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_state(ancestors, token_begin, num_tokens, kv_head, wanted, shape, ROWS: tl.constexpr):
    """State of a running softmax over what shared nodes gave a tile's rows, in the order of the nodes.

    Args:
        ancestors: their partial results, or None.
        token_begin, num_tokens: the tile's tokens, all of one sequence, so with equally many partials.
        kv_head: the tile's kv head.
        wanted: whether to begin with the partials; else the state is empty.
        ROWS: rows of the tile that can exist, a power of two.

    Returns:
        (top [R], total [R], values [R, padded_dim]) float32, as attend_tiles takes them.
    """
    if ancestors is None:
        top = tl.full([shape.rows], float("-inf"), tl.float32)
        total = tl.zeros([shape.rows], tl.float32)
        values = tl.zeros([shape.rows, shape.padded_dim], tl.float32)
        return top, total, values
    else:
        ABREAST: tl.constexpr = 64 // ROWS if ROWS < 64 else 1
        COPIES: tl.constexpr = shape.rows // ROWS
        row = tl.arange(0, ROWS)
        valid = row < num_tokens * shape.group
        first = tl.load(ancestors.merge_begin + token_begin + row // shape.group, mask=valid, other=0)
        head = kv_head * shape.group + row % shape.group
        count = tl.load(ancestors.merge_begin + token_begin + 1)
        count -= tl.load(ancestors.merge_begin + token_begin)
        d = tl.arange(0, shape.padded_dim)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, shape.padded_dim], tl.float32)
        wait_for_nodes(ancestors)
        for begin in range(0, tl.where(wanted, count, 0), ABREAST):
            index = begin + tl.arange(0, ABREAST)
            slot = (first[None, :] + index[:, None]).to(tl.int64)
            at = slot * (shape.group * shape.kv_heads) + head[None, :]
            mask = (index < count)[:, None] & valid[None, :]
            lse = tl.load(ancestors.lse + at, mask=mask, other=float("-inf"))
            pointers = ancestors.out + (at * shape.head_dim)[:, :, None] + d[None, None, :]
            in_head = (d < shape.head_dim)[None, None, :]
            out = tl.load(pointers, mask=mask[:, :, None] & in_head, other=0.0)
            top, total, values = fold_partials(top, total, values, out, lse * 1.4426950408889634)
        # Rows that cannot exist repeat those that can: nobody looks at them.
        top = tl.reshape(tl.broadcast_to(top[None, :], [COPIES, ROWS]), [shape.rows])
        total = tl.reshape(tl.broadcast_to(total[None, :], [COPIES, ROWS]), [shape.rows])
        values = tl.broadcast_to(values[None, :, :], [COPIES, ROWS, shape.padded_dim])
        return top, total, tl.reshape(values, [shape.rows, shape.padded_dim])
