"""How Hopper kernels get keys and values: TMA fills buffers in shared memory, mbarriers say which are full.

    fetching warp                       shared memory, stages s < NUM_STAGES            NUM_USERS warpgroups

    wait k_free[s]   <---------------------- k_free[s]   count NUM_USERS <----------------- arrive after q k
    expect bytes, TMA copy ----------------> k[s] [KEYS, D]
                       TMA, bytes done ----> k_filled[s] count 1 -------------------------> wait, then q k
    wait v_free[s]   <---------------------- v_free[s]   count NUM_USERS <----------------- arrive after w v
    expect bytes, TMA copy ----------------> v[s] [KEYS, D]
                       TMA, bytes done ----> v_filled[s] count 1 -------------------------> wait, then w v

Tile number n lies in stage n % NUM_STAGES. A user waits for phase (n // NUM_STAGES) % 2 of `filled`. The
fetching warp waits for the opposite phase of `free`, which a new barrier passes at once: buffers begin free.

prefill.py uses all of it, with 3 stages (2 in steps that only decode). decode.py has one warp that copies and
uses, so it waits for `filled` only.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


class Places(NamedTuple):
    """Where a (block, head, token) lies in the caches, which TMA sees as matrices.

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
    """Buffers in shared memory, each with its mbarriers `filled` (TMA arrives) and `free` (users arrive)."""

    stages: Any
    k: Any
    v: Any
    k_filled: Any
    v_filled: Any
    k_free: Any
    v_free: Any


@gluon.jit
def make_pipe(k, v, KEYS: gl.constexpr, D: gl.constexpr, NUM_STAGES: gl.constexpr, NUM_USERS: gl.constexpr):
    """Allocate buffers for tiles of KEYS keys and values; one is free when NUM_USERS warpgroups say so."""
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
    """Copy a sequence's tiles of one head, each as soon as its buffer is free.

    Returns:
        Number of tiles fetched so far, the `fetched` before this call included.
    """
    for tile in range(first_tile, first_tile + num_tiles):
        block = gl.load(source.table + tile * KEYS // shape.block_size)
        at = tile_place(source.places, block, tile, kv_head, shape, KEYS)
        stage, phase = fetched % pipe.stages, (fetched // pipe.stages + 1) & 1
        mbarrier.wait(pipe.k_free.index(stage), phase)
        copy_tile(source.k, at, pipe.k_filled.index(stage), pipe.k.index(stage))
        mbarrier.wait(pipe.v_free.index(stage), phase)
        copy_tile(source.v, at, pipe.v_filled.index(stage), pipe.v.index(stage))
        fetched += 1
    return fetched


@gluon.jit
def tile_place(places, block, tile, kv_head, shape, KEYS: gl.constexpr):
    """Return the row and column of a tile in the caches' matrices; `block` holds the tile."""
    row = block * places.block_rows + kv_head * places.head_rows
    return [row + tile * KEYS % shape.block_size, kv_head * places.head_columns]


@gluon.jit
def copy_tile(matrix, at, filled, buffer):
    """Start a TMA copy of a tile to a buffer; the barrier `filled` completes with it."""
    mbarrier.expect(filled, matrix.block_type.nbytes)
    tma.async_copy_global_to_shared(matrix, at, filled, buffer)


@gluon.jit
def clear_unseen(tile, num_seen, KEYS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Zero the values after the last key: memory that was never written may hold NaN, and 0 * NaN is NaN.

    Each warpgroup that uses the tile does this before its own product; all write the same zeros.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where((key < num_seen)[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()


@gluon.jit
def clear_outside(tile, first, end, KEYS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Zero the values before the first key and after the last one, as clear_unseen does.

    Both sides at once: a warpgroup that cleared one side, and wrote the other one back as it had been, would
    undo what another warpgroup has cleared there meanwhile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where(((key >= first) & (key < end))[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()
