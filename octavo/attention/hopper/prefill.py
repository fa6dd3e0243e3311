"""Prefill and shared nodes on Hopper GPUs, with the matrix units and the copy engine driven by hand.

Left to the compiler's schedule the matrix units idle during each softmax. Here one warp fetches tiles of
keys and values, and two warpgroups, each with half of the query rows, use them. They share the tiles but
never wait for each other: while one makes weights, the other has the matrix units. While sequences decode,
nodes have units of 64 rows, for one warpgroup, and the other half of the multiprocessor is for the leaves.

    warpgroup 0   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 | p1 v1 ][ softmax ...
    warpgroup 1                   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 ...

The units are those of triton_prefill, or the fat ones of a forest, whose query tokens are gathered and whose
number the device knows. Nodes may start while the kernel before them still runs.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.hopper import caches
from octavo.attention.hopper.pipe import Source, fetch_tiles, make_pipe
from octavo.attention.hopper.shapes import NODE_SHAPE, PROMPT_SHAPE
from octavo.attention.hopper.tiles import HALF, Gather, attend_item, key_tiles, pass_item
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton.arguments import Call
from octavo.attention.triton.shapes import TileShape
from octavo.attention.triton.step_map import FatWork
from octavo.attention.triton.units import RECORD
from octavo.gpu.device import num_multiprocessors


def unsupported_reason(call: Call, work: FatWork) -> str | None:
    """Say why the kernel cannot take a call's fat units; None: it can."""
    if work.num_parts > 1 or work.row_invariant or work.shape.rows != 2 * HALF.value:
        return "it takes units of 128 rows with all their keys, in steps that are not deterministic"
    return caches.unsupported_reason(call)


def nodes_unsupported_reason(call: Call, forest: DeviceForest) -> str | None:
    """Say why the kernel cannot take a forest's fat units; None: it can."""
    if forest.fat_tile(decodes=False) != NODE_SHAPE:
        return f"it takes nodes in tiles of {NODE_SHAPE}"
    return caches.unsupported_reason(call)


def attend_fat(call: Call, work: FatWork) -> None:
    """Attend the fat units."""
    wide = call.layer.k.shape[1] % PROMPT_SHAPE.keys == 0
    _attend(call, None, work.units, PROMPT_SHAPE if wide else NODE_SHAPE)


def attend_fat_nodes(call: Call, forest: DeviceForest, *, decodes: bool) -> None:
    """Attend a forest's fat units.

    The kernel may start while the one before it still runs. The plan it reads at once, and keys if they are
    older than the step. Before it reads or writes anything else, it waits; and only then does it let the next
    kernel in, which therefore may read queries and keys without waiting.

    Args:
        call: the call.
        forest: the plan.
        decodes: no sequence has more than one query token. Then no key of a node is one of this step's.
    """
    tile = forest.fat_tile(decodes=decodes)
    gather = Gather(forest.tokens, forest.slots, call.q.shape[0], forest.num_fat_units)
    _attend(call, gather, forest.fat_units, tile, keys_are_old=decodes)


def _attend(
    call: Call, gather: Gather | None, units: Tensor, tile: TileShape, *, keys_are_old: bool = True
) -> None:
    """Launch the kernel with a tiling whose keys divide a block."""
    # The fetching warp cedes most of its share of the registers to the others.
    _attend_kernel[(num_multiprocessors(call.q.device),)](
        *(call.queries, gather, call.cache, *caches.describe_caches(call, tile.keys), call.score),
        *(units, units.shape[0], call.shape(tile), tile.keys, tile.num_stages, keys_are_old),
        num_warps=4,
        maxnreg=tile.max_registers,
        launch_pdl=gather is not None,
    )


@gluon.jit(do_not_specialize=["num_units"])
def _attend_kernel(
    queries, gather, cache, k_matrix, v_matrix, places, score, units, num_units, shape,
    KEYS: gl.constexpr, STAGES: gl.constexpr, KEYS_ARE_OLD: gl.constexpr,
):  # fmt: skip
    """Attend the (unit, kv head)s of this program's turns; with units of 64 rows there is no second half."""
    if gather is not None:
        num_units = gl.load(gather.num_units)
    num_items = num_units * shape.kv_heads
    work = (units, num_items, gl.cdiv(num_items, gl.num_programs(0)))
    NUM_USERS: gl.constexpr = shape.rows // HALF
    pipe = make_pipe(k_matrix, v_matrix, KEYS, shape.head_dim, STAGES, NUM_USERS)
    if NUM_USERS == 1:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, pipe, shape, KEYS)),
                (_fetch, (cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_first_half, (queries, gather, score, work, pipe, shape, KEYS)),
                (_attend_second_half, (queries, gather, score, work, pipe, shape, KEYS)),
                (_fetch, (cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS, KEYS_ARE_OLD)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _item(turn):
    """Which (unit, kv head) a turn brings: forth and back through the programs, so that work evens out."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if turn % 2 == 1:
        program = num_programs - 1 - program
    return turn * num_programs + program


@gluon.jit
def _fetch(
    cache, k_matrix, v_matrix, places, work, pipe, shape, KEYS: gl.constexpr, KEYS_ARE_OLD: gl.constexpr
):
    """Copy the key and value tiles of all turns, as soon as buffers are free."""
    if not KEYS_ARE_OLD:
        gdc_wait()
    units, num_items, turns = work
    fetched = 0
    for turn in range(0, turns):
        item = _item(turn)
        # A turn beyond the last item looks at that one and finds nothing to do.
        record = units + gl.minimum(item, num_items - 1) // shape.kv_heads * RECORD
        first_tile, num_tiles = key_tiles(record, KEYS)
        table = cache.table + gl.load(record).to(gl.int64) * cache.table_row
        source = Source(k_matrix, v_matrix, places, table)
        num_tiles = gl.where(item < num_items, num_tiles, 0)
        fetched = fetch_tiles(
            source, first_tile, num_tiles, item % shape.kv_heads, pipe, fetched, shape, KEYS
        )


@gluon.jit
def _attend_first_half(queries, gather, score, work, pipe, shape, KEYS: gl.constexpr):
    if gather is not None:
        gdc_wait()
        gdc_launch_dependents()
    _attend_half(queries, gather, score, work, pipe, shape, KEYS, 0)


@gluon.jit
def _attend_second_half(queries, gather, score, work, pipe, shape, KEYS: gl.constexpr):
    if gather is not None:
        gdc_wait()
    _attend_half(queries, gather, score, work, pipe, shape, KEYS, HALF)


@gluon.jit
def _attend_half(
    queries, gather, score, work, pipe, shape, KEYS: gl.constexpr, FIRST_ROW: gl.constexpr
):  # fmt: skip
    """Attend half of the rows of all turns, from FIRST_ROW on."""
    units, num_items, turns = work
    used = 0
    for turn in range(0, turns):
        item = _item(turn)
        if item < num_items:
            record = units + item // shape.kv_heads * RECORD
            if gl.load(record + 2) * shape.group > FIRST_ROW:
                kv_head = item % shape.kv_heads
                used = attend_item(
                    queries, gather, score, record, kv_head, pipe, used, shape, KEYS, FIRST_ROW
                )
            else:
                used = pass_item(record, pipe, used, KEYS)
