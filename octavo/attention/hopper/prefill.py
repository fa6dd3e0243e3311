"""Prefill and shared nodes on Hopper GPUs, with tensor cores and TMA driven by hand.

Under the compiler's schedule the tensor cores idle during each softmax. Here one warp fetches tiles of keys
and values, and two warpgroups use them, each with half of the query rows. They share the tiles but never wait
for each other: while one computes weights, the other has the tensor cores.

    one program per SM: 12 warps, of which 9 work                 shared memory: 3 stages (pipe.py)

      warp 8, 24 registers     _fetch               TMA --------> k[3] [KEYS, D], v[3] [KEYS, D]
                                  ^                               k_filled[3], v_filled[3]   count 1: TMA
                                  |                                      |
                                  +---- k_free[3], v_free[3]             |        count 2: both warpgroups
                                                  ^                      v
      warps 0-3                _attend_first_half   rows   0 ..  63   wait filled, products, arrive free
      warps 4-7, 240 registers _attend_second_half  rows  64 .. 127   wait filled, products, arrive free

    in time
      warpgroup 0   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 | p1 v1 ][ softmax ...
      warpgroup 1                   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 ...

KEYS is 128 for prompts and 64 for nodes. In steps that only decode,
a unit has 64 rows: one warpgroup and the fetching warp, 2 stages, `free` barriers with count 1. The other
half of the SM is then for the leaves, which decode.py attends.

Units are those of triton/prefill.py, or the fat ones of a forest; the device knows their number. A forest's
query tokens are gathered. The kernel for nodes may start while the kernel before it still runs.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.hopper import caches
from octavo.attention.hopper.pipe import Source, fetch_tiles, make_pipe
from octavo.attention.hopper.shapes import NODE_SHAPE, PROMPT_SHAPE
from octavo.attention.hopper.tiles import HALF, PREFETCH, QSMEM, Gather, attend_item, fetch_queries, key_tiles, open_turns, pass_item, which_item
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton.arguments import Call
from octavo.attention.triton.shapes import TileShape
from octavo.attention.triton.units import RECORD
from octavo.attention.triton.work import FatWork
from octavo.gpu.device import num_multiprocessors
from octavo.gpu.launch import launch


def unsupported_reason(call: Call, work: FatWork) -> str | None:
    """Return why the kernel cannot run a call's fat units, or None if it can."""
    if work.num_parts > 1 or work.row_invariant or work.shape.rows != 2 * HALF.value:
        return "it needs units of 128 rows with all their keys, and is not deterministic"
    return caches.unsupported_reason(call)


def nodes_unsupported_reason(call: Call, forest: DeviceForest) -> str | None:
    """Return why the kernel cannot run a forest's fat units, or None if it can."""
    if forest.fat_tile(decodes=False) != NODE_SHAPE:
        return f"it needs nodes in tiles of {NODE_SHAPE}"
    return caches.unsupported_reason(call)


def attend_fat(call: Call, work: FatWork) -> None:
    """Attend the fat units."""
    _attend(call, None, work.units, work.count, PROMPT_SHAPE)


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
    # The fetching warp gives most of its registers to the warpgroups.
    launch(
        _attend_kernel,
        (num_multiprocessors(call.q.device),),
        *(call.queries, gather, call.cache, *caches.describe_caches(call, tile.keys), call.score),
        *(units, count, call.shape(tile), tile.keys, tile.num_stages, keys_are_old),
        num_warps=4,
        maxnreg=tile.max_registers,
        launch_pdl=gather is not None,
    )


@gluon.jit
def _attend_kernel(
    queries, gather, cache, k_matrix, v_matrix, places, score, units, count, shape,
    KEYS: gl.constexpr, STAGES: gl.constexpr, KEYS_ARE_OLD: gl.constexpr,
):  # fmt: skip
    """Attend this program's (unit, kv head)s, one per turn; units of 64 rows have no second half."""
    if gather is None:
        # Thin units may begin on an SM as soon as this program leaves it: they read and write other rows.
        gdc_launch_dependents()
    num_items = gl.load(count) * shape.kv_heads
    work = (units, num_items, gl.cdiv(num_items, gl.num_programs(0)))
    NUM_USERS: gl.constexpr = shape.rows // HALF
    pipe = make_pipe(k_matrix, v_matrix, KEYS, shape.head_dim, STAGES, NUM_USERS)
    flags = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(flags.index(i), count=1)
    fence_async_shared()
    q_tiles = gl.allocate_shared_memory(
        k_matrix.dtype,
        [NUM_USERS, HALF, shape.head_dim],
        gl.NVMMASharedLayout.get_default_for([HALF, shape.head_dim], k_matrix.dtype),
    )
    if NUM_USERS == 1:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, pipe, shape, KEYS, flags, q_tiles)),
                (_fetch, (cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, pipe, shape, KEYS, flags, q_tiles)),
                (_attend_second_half, (queries, gather, score, work, pipe, shape, KEYS, flags, q_tiles)),
                (_fetch, (cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _fetch(
    cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS: gl.constexpr, KEYS_ARE_OLD: gl.constexpr
):
    """Copy the key and value tiles of all turns, each as soon as its buffer is free."""
    if not KEYS_ARE_OLD:
        gdc_wait()
    units, num_items, turns = work
    fetched = 0
    for turn in range(0, turns):
        item = which_item(turn)
        # A turn beyond the last item reads that item's record and copies no tile.
        record = units + gl.minimum(item, num_items - 1) // shape.kv_heads * RECORD
        first_tile, num_tiles = key_tiles(record, KEYS)
        table = cache.table + gl.load(record).to(gl.int64) * cache.table_row
        source = Source(k_matrix, v_matrix, places, table, gl.load(record + 4))
        num_tiles = gl.where(item < num_items, num_tiles, 0)
        fetched = fetch_tiles(
            source, first_tile, num_tiles, item % shape.kv_heads, pipe, fetched, shape, KEYS
        )


@gluon.jit
def _attend_first_half(queries, gather, score, work, pipe, shape, KEYS: gl.constexpr, flags, q_tiles):
    if gather is not None:
        gdc_wait()
        gdc_launch_dependents()
    _attend_half(queries, gather, score, work, pipe, shape, KEYS, 0, flags, q_tiles)


@gluon.jit
def _attend_second_half(queries, gather, score, work, pipe, shape, KEYS: gl.constexpr, flags, q_tiles):
    if gather is not None:
        gdc_wait()
    _attend_half(queries, gather, score, work, pipe, shape, KEYS, HALF, flags, q_tiles)


@gluon.jit
def _attend_half(
    queries, gather, score, work, pipe, shape, KEYS: gl.constexpr, FIRST_ROW: gl.constexpr, flags, q_tiles
):  # fmt: skip
    """Attend half of the rows of all turns, from FIRST_ROW on."""
    units, num_items, turns = work
    used = 0
    q_tile = q_tiles.index(1 if FIRST_ROW > 0 else 0)
    open_turns(used, FIRST_ROW > 0, shape)
    if PREFETCH == 1:
        fetch_queries(queries, gather, work, 0, q_tile, shape, FIRST_ROW)
    for turn in range(0, turns):
        item = which_item(turn)
        if item < num_items:
            record = units + item // shape.kv_heads * RECORD
            if gl.load(record + 2) * shape.group > FIRST_ROW:
                kv_head = item % shape.kv_heads
                used = attend_item(
                    queries, gather, score, record, kv_head, pipe, used, shape, KEYS, FIRST_ROW, flags, q_tile, work, turn
                )
            else:
                if PREFETCH == 1:
                    async_copy.wait_group(0)
                    fetch_queries(queries, gather, work, turn + 1, q_tile, shape, FIRST_ROW)
                used = pass_item(record, pipe, used, KEYS, flags, shape)
