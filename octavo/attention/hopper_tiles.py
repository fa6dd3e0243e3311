# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# The kernel language is not typed.
"""What the Hopper kernels share: tiles of keys and values on their way, a warpgroup's rows against them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.attention.triton_tiles import LN_2

# Query rows of a warpgroup.
HALF = gl.constexpr(64)


class Places(NamedTuple):
    """Where a (block, head, token) lies in the caches seen as matrices for the copy engine.

    row = block * block_rows + head * head_rows + token, column = head * head_columns
    """

    block_rows: Any
    head_rows: Any
    head_columns: Any


class Source(NamedTuple):
    """A sequence's keys and values: the matrices, where a token lies in them, and the block ids."""

    k: Any
    v: Any
    places: Any
    table: Any


class Pipe(NamedTuple):
    """Buffers in shared memory, and for each the barriers 'filled' (by the copy engine) and 'free' again."""

    stages: Any
    k: Any
    v: Any
    k_filled: Any
    v_filled: Any
    k_free: Any
    v_free: Any


class Gather(NamedTuple):
    """Query tokens that lie scattered: entry i is row tokens[i] of q, its result is row slots[i].

    Rows of q from num_rows on do not exist. counts points to the number of units and to that of the programs
    that work on them.
    """

    tokens: Any
    slots: Any
    num_rows: Any
    counts: Any


class Item(NamedTuple):
    """What stays the same over an item's tiles; `used` tiles of the pipe came before the item's first."""

    q: Any
    position: Any
    score: Any
    first_tile: Any
    num_tiles: Any
    kv_end: Any
    pipe: Any
    used: Any
    shape: Any


@gluon.jit
def make_pipe(k, v, KEYS: gl.constexpr, D: gl.constexpr, NUM_STAGES: gl.constexpr, NUM_USERS: gl.constexpr):
    """Allocate buffers for tiles of KEYS keys and values, each free when all NUM_USERS warpgroups say so."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    pipe = Pipe(
        NUM_STAGES,
        gl.allocate_shared_memory(k.dtype, [NUM_STAGES, KEYS, D], k.layout),
        gl.allocate_shared_memory(v.dtype, [NUM_STAGES, KEYS, D], v.layout),
        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(pipe.k_filled.index(stage), count=1)
        mbarrier.init(pipe.v_filled.index(stage), count=1)
        mbarrier.init(pipe.k_free.index(stage), count=NUM_USERS)
        mbarrier.init(pipe.v_free.index(stage), count=NUM_USERS)
    fence_async_shared()
    return pipe


@gluon.jit
def fetch_tiles(source, first_tile, num_tiles, kv_head, pipe, fetched, shape, KEYS: gl.constexpr):
    """Copy a sequence's tiles of one head as soon as buffers are free.

    Returns:
        Tiles fetched so far, `fetched` of them before.
    """
    for tile in range(first_tile, first_tile + num_tiles):
        at = tile_place(source.places, source.table, tile, kv_head, shape, KEYS)
        stage, phase = fetched % pipe.stages, (fetched // pipe.stages + 1) & 1
        mbarrier.wait(pipe.k_free.index(stage), phase)
        copy_tile(source.k, at, pipe.k_filled.index(stage), pipe.k.index(stage))
        mbarrier.wait(pipe.v_free.index(stage), phase)
        copy_tile(source.v, at, pipe.v_filled.index(stage), pipe.v.index(stage))
        fetched += 1
    return fetched


@gluon.jit
def tile_place(places, table, tile, kv_head, shape, KEYS: gl.constexpr):
    """Row and column of a sequence's tile in the caches' matrices."""
    start = tile * KEYS
    row = gl.load(table + start // shape.block_size) * places.block_rows
    return [row + kv_head * places.head_rows + start % shape.block_size, kv_head * places.head_columns]


@gluon.jit
def copy_tile(matrix, at, filled, buffer):
    """Have a tile copied to a buffer, and the barrier told."""
    mbarrier.expect(filled, matrix.block_type.nbytes)
    tma.async_copy_global_to_shared(matrix, at, filled, buffer)


@gluon.jit
def key_tiles(record, KEYS: gl.constexpr):
    """First key tile of a unit and how many there are; none for an unused record."""
    exists = gl.load(record + 2) > 0
    first = gl.load(record + 3) // KEYS
    return first, gl.where(exists, gl.cdiv(gl.load(record + 4), KEYS) - first, 0)


@gluon.jit
def pass_item(record, pipe, used, KEYS: gl.constexpr):
    """Let an item's tiles go by for a half that has no rows in it; returns the number of the tile after."""
    _, num_tiles = key_tiles(record, KEYS)
    for i in range(0, num_tiles):
        stage, phase = (used + i) % pipe.stages, ((used + i) // pipe.stages) & 1
        mbarrier.wait(pipe.k_filled.index(stage), phase)
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    return used + num_tiles


@gluon.jit
def attend_item(
    queries, gather, score, record, kv_head, pipe, used, shape,
    KEYS: gl.constexpr, FIRST_ROW: gl.constexpr,
):  # fmt: skip
    """Attend half of one item's rows, from the pipe's tile number `used` on; returns the number after it."""
    first_tile, num_tiles = key_tiles(record, KEYS)
    top, total, values = attend_keys(
        queries, gather, score, record, kv_head, pipe, used, first_tile, num_tiles, shape, KEYS, FIRST_ROW
    )
    out, lse, row = normalise(top, total, values, FIRST_ROW)
    store_rows(queries, gather, out, lse, row, record, kv_head, shape)
    return used + num_tiles


@gluon.jit
def attend_keys(
    queries, gather, score, record, kv_head, pipe, used, first_tile, num_tiles, shape,
    KEYS: gl.constexpr, FIRST_ROW: gl.constexpr,
):  # fmt: skip
    """Attend a unit's rows FIRST_ROW .. FIRST_ROW + 63 to some of its key tiles.

    Args:
        record: the unit's.
        used: tiles of the pipe that came before.
        first_tile, num_tiles: which of the unit's tiles.

    Returns:
        (top [64], total [64], values [64, D]) float32: the state of a running softmax.
    """
    D: gl.constexpr = shape.head_dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    token_begin, num_tokens, kv_end = gl.load(record + 1), gl.load(record + 2), gl.load(record + 4)
    row = FIRST_ROW + gl.arange(0, HALF, layout=ROW)
    token, exists = _query_rows(gather, token_begin + row // shape.group, row < num_tokens * shape.group)
    position = gl.load(queries.positions + token, mask=exists, other=-1)
    q = _load_queries(queries, gather, token_begin, num_tokens, kv_head, shape, FIRST_ROW, S_LAYOUT)
    top = gl.full([HALF], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([HALF], 0.0, gl.float32, layout=ROW)
    values = gl.zeros([HALF, D], gl.float32, layout=O_LAYOUT)
    item = Item(q, position, score, first_tile, num_tiles, kv_end, pipe, used, shape)
    if num_tiles > 0:
        stage = used % pipe.stages
        mbarrier.wait(pipe.k_filled.index(stage), (used // pipe.stages) & 1)
        zero = gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(q, pipe.k.index(stage).permute((1, 0)), zero, use_acc=False)
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        # Nothing is summed up yet that the first tile's maximum could shrink.
        weights, top, total, _ = _softmax(s, top, total, 0, item, KEYS, True, O_LAYOUT)
        weights, values, top, total = _attend_rest(weights, values, top, total, item, record, KEYS)
        last = used + num_tiles - 1
        stage = last % pipe.stages
        mbarrier.wait(pipe.v_filled.index(stage), (last // pipe.stages) & 1)
        num_seen = kv_end - (first_tile + num_tiles - 1) * KEYS
        if num_seen < KEYS:
            clear_unseen(pipe.v.index(stage), num_seen, KEYS, D, 4)
        values = warpgroup_mma(weights, pipe.v.index(stage), values)
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    return top, total, values


@gluon.jit
def _attend_rest(weights, values, top, total, item, record, KEYS: gl.constexpr):
    """Attend to an item's tiles after the first, masking only those that some row sees in part."""
    first_tile, num_tiles = item.first_tile, item.num_tiles
    full_begin, full_end = gl.load(record + 5), gl.load(record + 6)
    left = 1
    if item.shape.windowed:
        left = gl.minimum(num_tiles, gl.maximum(1, gl.cdiv(full_begin, KEYS) - first_tile))
        for i in range(1, left):
            weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True)
    right = gl.maximum(left, gl.minimum(num_tiles, full_end // KEYS - first_tile))
    for i in range(left, right):
        weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, False)
    for i in range(right, num_tiles):
        weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True)
    return weights, values, top, total


@gluon.jit
def _step(i, weights, values, top, total, item, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """Multiply an item's i-th tile of keys and, with the weights made before, the values before it."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = values.type.layout
    pipe = item.pipe
    now, before = item.used + i, item.used + i - 1
    k_stage, v_stage = now % pipe.stages, before % pipe.stages
    mbarrier.wait(pipe.k_filled.index(k_stage), (now // pipe.stages) & 1)
    zero = gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(item.q, pipe.k.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(pipe.v_filled.index(v_stage), (before // pipe.stages) & 1)
    pending = warpgroup_mma(weights, pipe.v.index(v_stage), values, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(pipe.k_free.index(k_stage), count=1)
    new_weights, top, total, shrink = _softmax(s, top, total, i, item, KEYS, MASKED, O_LAYOUT)
    # The old weights are read until here; named, so that the compiler keeps their registers.
    values, weights = warpgroup_mma_wait(0, deps=(pending, weights))
    mbarrier.arrive(pipe.v_free.index(v_stage), count=1)
    return new_weights, values * shrink[:, None], top, total


@gluon.jit
def _softmax(
    s, top, total, i, item, KEYS: gl.constexpr, MASKED: gl.constexpr, O_LAYOUT: gl.constexpr
):  # fmt: skip
    """Fold the i-th tile's scores into the maximum and sum: (weights as an operand, top, total, shrink)."""
    factor = item.score.factor
    if MASKED:
        key = (item.first_tile + i) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        visible = (key[None, :] <= item.position[:, None]) & (key < item.kv_end)[None, :]
        if item.shape.windowed:
            visible = visible & (key[None, :] > item.position[:, None] - item.score.window)
        s = gl.where(visible, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = new_top
    if MASKED:
        # A row that has seen nothing keeps -inf; from 0 its weights are exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * factor - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(weights, 1)
    operand = gl.convert_layout(weights.to(item.q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return operand, new_top, total, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))


@gluon.jit
def _query_rows(gather, entry, valid):
    """Row of q [R] int64 of each entry, which it is itself if not gathered, and whether it exists [R]."""
    if gather is None:
        return entry.to(gl.int64), valid
    else:
        token = gl.load(gather.tokens + entry, mask=valid, other=0)
        return token.to(gl.int64), valid & (token < gather.num_rows)


@gluon.jit
def _result_rows(gather, entry, valid):
    """Row of the results [R] int64 of each entry, which it is itself if not gathered."""
    if gather is None:
        return entry.to(gl.int64)
    else:
        return gl.load(gather.slots + entry, mask=valid, other=0).to(gl.int64)


@gluon.jit
def _load_queries(
    queries, gather, token_begin, num_tokens, kv_head, shape,
    FIRST_ROW: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a half tile's queries as the left operand of a product, to stay in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    token, exists = _query_rows(gather, token_begin + row // shape.group, row < num_tokens * shape.group)
    head = kv_head * shape.group + row % shape.group
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    return gl.convert_layout(
        gl.load(pointers, mask=exists[:, None], other=0.0), gl.DotOperandLayout(0, S_LAYOUT, 2)
    )


@gluon.jit
def clear_unseen(tile, num_seen, KEYS: gl.constexpr, D: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Zero the values behind the last key: a weight of 0 would not silence a NaN nobody has written.

    All who use the tile do it, each before its own product; what they write is the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where((key < num_seen)[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()


@gluon.jit
def normalise(top, total, values, FIRST_ROW: gl.constexpr):
    """Finish a running softmax: (out [64, D], lse [64] natural log, row [64]); 0 and -inf after no key."""
    ROW: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
    safe = gl.where(total > 0, total, 1.0)
    lse = gl.where(total > 0, (top + gl.log2(safe)) * LN_2, float("-inf"))
    return values / safe[:, None], lse, FIRST_ROW + gl.arange(0, HALF, layout=ROW)


@gluon.jit
def store_rows(queries, gather, out, lse, row, record, kv_head, shape):
    """Write a unit's rows of the results."""
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, out.type.layout))
    exists = row < gl.load(record + 2) * shape.group
    result = _result_rows(gather, gl.load(record + 1) + row // shape.group, exists)
    at = result * (shape.group * shape.kv_heads) + kv_head * shape.group + row % shape.group
    out = out.to(queries.out.dtype.element_ty)
    gl.store(queries.out + (at * shape.head_dim)[:, None] + d[None, :], out, mask=exists[:, None])
    gl.store(queries.lse + at, lse, mask=exists)
