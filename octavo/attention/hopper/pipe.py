"""How Hopper kernels get keys and values: TMA fills buffers in shared memory, mbarriers say which are full.

    fetching warp                       shared memory, stages s < NUM_STAGES            NUM_USERS warpgroups

    wait k_free[s]   <---------------------- k_free[s]   count NUM_USERS <----------------- arrive after q k
    expect bytes, TMA copies --------------> k[s] [KEYS, D]
                       TMA, bytes done ----> k_filled[s] count 1 -------------------------> wait, then q k
    wait v_free[s]   <---------------------- v_free[s]   count NUM_USERS <----------------- arrive after w v
    expect bytes, TMA copies --------------> v[s] [KEYS, D]
                       TMA, bytes done ----> v_filled[s] count 1 -------------------------> wait, then w v

Tile number n lies in stage n % NUM_STAGES. A user waits for phase (n // NUM_STAGES) % 2 of `filled`. The
fetching warp waits for the opposite phase of `free`, which a new barrier passes at once: buffers begin free.

prefill.py uses all of it, with 3 stages (2 in steps that only decode). decode.py has one warp that copies and
uses, so it waits for `filled` only.

A tile is copied in parts: as many of its keys as surely lie in one block of the cache, times the 128 bytes
that a swizzled row of shared memory has. Part (c, p) is where one copy of the whole tile would put it:

    KEYS = 64, D = 128, blocks of 16:     columns 0 .. 63     columns 64 .. 127
                          keys  0 .. 15      part (0, 0)          part (1, 0)       block table[4 * tile]
                               16 .. 31      part (0, 1)          part (1, 1)       block table[4 * tile + 1]
                               32 .. 47      part (0, 2)          part (1, 2)
                               48 .. 63      part (0, 3)          part (1, 3)
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
    """A sequence's keys and values.

    k, v: the caches as matrices.
    places: where a token lies in them.
    table: the sequence's block ids.
    kv_end: its last key + 1.
    """

    k: Any
    v: Any
    places: Any
    table: Any
    kv_end: Any


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
    """Copy a sequence's tiles of one head, the last tile first, each as soon as its buffer is free.

    Returns:
        Number of tiles fetched so far, the `fetched` before this call included.
    """
    PART: gl.constexpr = source.k.block_type.shape[0]
    for i in range(0, num_tiles):
        tile = first_tile + num_tiles - 1 - i
        stage, phase = fetched % pipe.stages, (fetched // pipe.stages + 1) & 1
        k, k_filled = pipe.k.index(stage), pipe.k_filled.index(stage)
        v, v_filled = pipe.v.index(stage), pipe.v_filled.index(stage)
        mbarrier.wait(pipe.k_free.index(stage), phase)
        expect_tile(k, k_filled)
        # Not unrolled, since the warp has few registers.
        for part in range(0, KEYS // PART):
            block = block_id(source, tile, part, shape, KEYS)
            copy_part(source.k, source.places, block, tile, part, kv_head, k_filled, k, shape)
        mbarrier.wait(pipe.v_free.index(stage), phase)
        expect_tile(v, v_filled)
        for part in range(0, KEYS // PART):
            block = block_id(source, tile, part, shape, KEYS)
            copy_part(source.v, source.places, block, tile, part, kv_head, v_filled, v, shape)
        fetched += 1
    return fetched


@gluon.jit
def block_id(source, tile, part, shape, KEYS: gl.constexpr):
    """Load the id of the block of a tile's part; 0 for one that begins after the last key: no row sees it."""
    PART: gl.constexpr = source.k.block_type.shape[0]
    key = tile * KEYS + part * PART
    return gl.load(source.table + key // shape.block_size, mask=key < source.kv_end, other=0)


@gluon.jit
def expect_tile(buffer, filled):
    """Let the barrier `filled` complete with the copies of all parts of a tile."""
    mbarrier.expect(filled, buffer.shape[0] * buffer.shape[1] * buffer.dtype.primitive_bitwidth // 8)


@gluon.jit
def copy_part(matrix, places, block, tile, part, kv_head, filled, buffer, shape):
    """Start the TMA copies of a part of a tile, which lies in a block, to its places in a buffer."""
    KEYS: gl.constexpr = buffer.shape[0]
    PART: gl.constexpr = matrix.block_type.shape[0]
    WIDTH: gl.constexpr = matrix.block_type.shape[1]
    NUM_PARTS: gl.constexpr = KEYS // PART
    NUM_COLUMNS: gl.constexpr = shape.head_dim // WIDTH
    parts = buffer._reinterpret(matrix.dtype, [NUM_COLUMNS * NUM_PARTS, PART, WIDTH], matrix.layout)
    row = (
        block * places.block_rows
        + kv_head * places.head_rows
        + (tile * KEYS + part * PART) % shape.block_size
    )
    for c in gl.static_range(NUM_COLUMNS):
        at = [row, kv_head * places.head_columns + c * WIDTH]
        tma.async_copy_global_to_shared(matrix, at, filled, parts.index(c * NUM_PARTS + part))


@gluon.jit
def clear_outside(tile, first, end, KEYS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Zero the values before the first key and from `end` on: memory that was never written may hold NaN.

    0 * NaN is NaN. Each warpgroup that uses the tile does this before its own product; all write the same
    zeros. Both sides at once: a warpgroup that cleared one side, and wrote the other one back as it had been,
    would undo what another warpgroup has cleared there meanwhile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where(((key >= first) & (key < end))[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()
