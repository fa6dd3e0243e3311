"""Prefill and shared nodes on Hopper GPUs, with tensor cores and TMA driven by hand.

Under the compiler's schedule the tensor cores idle during each softmax. Here one warp fetches tiles of keys
and values, and two warpgroups use them, each with half of the query rows. They take turns: while one computes
weights, the other has the tensor cores. A warpgroup's own product with values, too, runs beside its softmax.

    one program per SM: 12 warps, of which 9 work                 shared memory: 3 stages (pipe.py)

      warp 8, 24 registers     _fetch               TMA --------> k[3] [KEYS, D], v[3] [KEYS, D]
                                  ^                               k_filled[3], v_filled[3]   count 1: TMA
                                  |                                      |
                                  +---- k_free[3], v_free[3]             |        count 2: both warpgroups
                                                  ^                      v
      warps 0-3                _attend_first_half   rows   0 ..  63   wait filled, products, arrive free
      warps 4-7, 240 registers _attend_second_half  rows  64 .. 127   wait filled, products, arrive free
                                                    q[2] [64, D], copied ahead of its item
                                                    turns by two hardware barriers (prefill_tiles.py)

    in time
      tensor cores  [ q k1 | p0 v0 ][ q k1 | p0 v0 ][ q k2 | p1 v1 ][ q k2 | p1 v1 ][ ...
                      warpgroup 0     warpgroup 1     warpgroup 0     warpgroup 1
      warpgroup 0            [ softmax k1 -> p1    ]        [ softmax k2 -> p2    ]
      warpgroup 1                             [ softmax k1 -> p1    ]        [ softmax ...

KEYS is 128 for prompts, and 64 for few query tokens, nodes, prompts beside nodes, and heads of 256, for which
there are 2 stages. It is 32 for heads of 512: there both warpgroups have the same 64 rows and each of them
half of the dimensions of values, so that results fit their registers; both compute all scores. Else a unit of
short prompts, or of nodes in steps that only decode, has 64 rows: one warpgroup, which waits for no turn, and
the fetching warp, `free` barriers with count 1. Two programs of short prompts fit on an SM. Nodes have 2
stages then, and the other half of the SM is for the leaves, which tma_decode.py attends.

Units are those of triton/paged_prefill.py, or the fat ones of a forest; the device knows their number. The
query tokens of a forest are gathered. The kernel for nodes may start while the kernel before it still runs.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.hopper import prefill_queries
from octavo.attention.hopper.pipe import (
    Source,
    cache_unsupported_reason,
    describe_caches,
    fetch_tiles,
    make_pipe,
)
from octavo.attention.hopper.prefill_queries import (
    HALF,
    Gather,
    Work,
    fetch_next_queries,
    fetch_queries,
    first_row,
    item_of,
    key_tiles,
    num_warpgroups,
    record_of,
)
from octavo.attention.hopper.prefill_tiles import attend_item, open_turns, pass_item
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.tilings.hopper import (
    NODE_SHAPE,
    PROMPT_SHAPE,
    SHORT_SHAPE,
    WIDE_SHAPES,
    attended_tile,
)
from octavo.attention.tilings.portable import TileShape
from octavo.attention.triton.kernel_call import Call, PrefillWork
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import launch


def unsupported_reason(call: Call, work: PrefillWork) -> str | None:
    """Return why the kernel cannot run a call's prefill units, or None if it can."""
    is_tiled = work.shape == SHORT_SHAPE or work.shape.rows == PROMPT_SHAPE.rows
    wide = WIDE_SHAPES.get(call.layer.k.shape[3])
    if wide is not None:
        is_tiled = work.shape == wide
    if work.num_parts > 1 or work.row_invariant or not is_tiled:
        needed = wide or f"{PROMPT_SHAPE.rows} rows, or {SHORT_SHAPE}"
        return f"it needs units of {needed}, and all keys; not deterministic"
    return cache_unsupported_reason(call) or prefill_queries.unsupported_reason(call)


def nodes_unsupported_reason(call: Call, forest: DeviceForest) -> str | None:
    """Return why the kernel cannot run a forest's fat units, or None if it can."""
    shape = WIDE_SHAPES.get(call.layer.k.shape[3], NODE_SHAPE)
    if forest.fat_tile(decodes=False) != shape:
        return f"it needs nodes in tiles of {shape}"
    return cache_unsupported_reason(call) or prefill_queries.unsupported_reason(call)


def attend_prefill(call: Call, work: PrefillWork) -> None:
    """Attend the prefill units."""
    num_tokens, num_heads, _ = call.q.shape
    tile = attended_tile(call.q.device, work.shape, num_tokens * num_heads, work.leaves_begin_at)
    _attend(call, None, work.units, work.count, tile)


def attend_fat_nodes(call: Call, forest: DeviceForest, *, decodes: bool) -> None:
    """Attend a forest's fat units; arguments as for triton.nodes.attend_fat_nodes.

    The kernel may start while the previous one still runs. It reads the plan at once, and the keys too if
    they are older than the step. It waits before it reads or writes anything else. Only then does it let the
    next kernel start, which therefore may read queries and keys without waiting.
    """
    tile = forest.fat_tile(decodes=decodes)
    gather = Gather(forest.tokens, forest.partial_ids, call.q.shape[0])
    _attend(call, gather, forest.fat_units, forest.num_fat_units, tile, keys_are_old=decodes)


def _attend(
    call: Call,
    gather: Gather | None,
    units: Tensor,
    count: Tensor,
    tile: TileShape,
    *,
    keys_are_old: bool = True,
) -> None:
    """Launch the kernel on the first units, as many as `count` [1] says."""
    k_matrix, v_matrix, places = describe_caches(call, tile.keys)
    # The fetching warp gives most of its registers to the warpgroups.
    launch(
        _attend_kernel,
        (num_multiprocessors(call.q.device) * tile.programs_per_multiprocessor,),
        queries=call.queries, gather=gather, table=call.cache.table, table_row=call.cache.table.stride(0),
        k_matrix=k_matrix, v_matrix=v_matrix, places=places, score=call.score, units=units, count=count,
        shape=call.shape(tile), KEYS=tile.keys, STAGES=tile.num_stages, KEYS_ARE_OLD=keys_are_old,
        num_warps=4, maxnreg=tile.max_registers, launch_pdl=gather is not None,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["table_row"])
def _attend_kernel(
    queries, gather, table, table_row, k_matrix, v_matrix, places, score, units, count, shape,
    KEYS: gl.constexpr, STAGES: gl.constexpr, KEYS_ARE_OLD: gl.constexpr,
):  # fmt: skip
    """Attend this program's (unit, kv head)s, one per turn; units of 64 rows have no second half."""
    num_items = gl.load(count) * shape.kv_heads
    work = Work(units, num_items, gl.cdiv(num_items, gl.num_programs(0)))
    NUM_USERS: gl.constexpr = num_warpgroups(shape.rows, shape.head_dim)
    D: gl.constexpr = shape.head_dim
    NUM_QUERIES: gl.constexpr = shape.rows // HALF
    pipe = make_pipe(k_matrix, v_matrix, KEYS, D, STAGES, NUM_USERS)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], k_matrix.dtype)
    q = gl.allocate_shared_memory(k_matrix.dtype, [NUM_QUERIES, HALF, D], Q_LAYOUT)
    if NUM_USERS == 1:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, q, pipe, shape, KEYS)),
                (
                    _fetch,
                    (table, table_row, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD),
                ),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, q, pipe, shape, KEYS)),
                (_attend_second_half, (queries, gather, score, work, q, pipe, shape, KEYS)),
                (
                    _fetch,
                    (table, table_row, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD),
                ),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _fetch(
    table, table_row, k_matrix, v_matrix, places, work, pipe, shape,
    KEYS: gl.constexpr, KEYS_ARE_OLD: gl.constexpr,
):  # fmt: skip
    """Copy the key and value tiles of all turns, each as soon as its buffer is free."""
    if not KEYS_ARE_OLD:
        gdc_wait()
    fetched = 0
    for turn in range(0, work.turns):
        item = item_of(turn)
        # A turn beyond the last item reads that item's record and copies no tile.
        record = record_of(work, gl.minimum(item, work.num_items - 1), shape)
        first_tile, num_tiles = key_tiles(record, KEYS)
        ids = table + gl.load(record).to(gl.int64) * table_row
        source = Source(k_matrix, v_matrix, places, ids, gl.load(record + 4))
        num_tiles = gl.where(item < work.num_items, num_tiles, 0)
        fetched = fetch_tiles(
            source, first_tile, num_tiles, item % shape.kv_heads, pipe, fetched, shape, KEYS
        )


@gluon.jit
def _attend_first_half(queries, gather, score, work, q, pipe, shape, KEYS: gl.constexpr):
    if gather is not None:
        gdc_wait()
        gdc_launch_dependents()
    _attend_half(queries, gather, score, work, q, pipe, shape, KEYS, False)


@gluon.jit
def _attend_second_half(queries, gather, score, work, q, pipe, shape, KEYS: gl.constexpr):
    if gather is not None:
        gdc_wait()
    _attend_half(queries, gather, score, work, q, pipe, shape, KEYS, True)


@gluon.jit
def _attend_half(
    queries, gather, score, work, q, pipe, shape, KEYS: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Attend a warpgroup's half of the rows of all turns, or of the values' dimensions."""
    FIRST_ROW: gl.constexpr = first_row(SECOND, shape.head_dim)
    q = q.index(FIRST_ROW // HALF)
    open_turns(SECOND)
    used = 0
    fetch_queries(queries, gather, work, 0, q, shape, SECOND)
    for turn in range(0, work.turns):
        item = item_of(turn)
        if item < work.num_items:
            record = record_of(work, item, shape)
            if gl.load(record + 2) * shape.group > FIRST_ROW:
                used = attend_item(
                    queries, gather, score, record, item % shape.kv_heads, q, work, turn, pipe, used,
                    shape, KEYS, SECOND,
                )  # fmt: skip
            else:
                fetch_next_queries(queries, gather, work, turn, q, shape, SECOND)
                used = pass_item(record, pipe, used, shape, KEYS, SECOND)
