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

tma_prefill.py uses all of it, with 3 stages (2 in steps that only decode). The one warp of tma_decode.py both
copies and uses, so it waits for `filled` only.

A tile is copied in parts: as many of its keys as surely lie in one block of the cache, times the 128 bytes
that a swizzled row of shared memory has. Part (c, p) is where one copy of the whole tile would put it:

    KEYS = 64, D = 128, blocks of 16:     columns 0 .. 63     columns 64 .. 127
                          keys  0 .. 15      part (0, 0)          part (1, 0)       block table[4 * tile]
                               16 .. 31      part (0, 1)          part (1, 1)       block table[4 * tile + 1]
                               32 .. 47      part (0, 2)          part (1, 2)
                               48 .. 63      part (0, 3)          part (1, 3)

TMA reads a cache as one matrix:

    cache [N, B, KH, D]      a matrix of rows of D numbers, token after token in memory
    part  (block, head, t)   rows of it, from block * block_rows + head * head_rows + t on, of 128 bytes each
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.tilings import hopper
from octavo.attention.triton.kernel_call import Call


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
        # The loop is not unrolled, since the warp has few registers.
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
    values = tile.load(LAYOUT)
    tile.store(gl.where(((key >= first) & (key < end))[:, None], values, 0.0).to(values.dtype))
    fence_async_shared()


_Sizes = tuple[int, ...]
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_SWIZZLED_BYTES = 128


def cache_unsupported_reason(call: Call) -> str | None:
    """Return why Hopper's kernels cannot run on a call's cache and options, or None if they can."""
    options, k, v = call.options, call.layer.k, call.layer.v
    if options.softcap != 0 or options.alibi_slopes is not None:
        return "it has no softcap and no ALiBi"
    if k.dtype != call.q.dtype:
        return "its products read what TMA wrote: queries and cache must have one dtype"
    strides = k.stride()
    if strides != v.stride() or (k.data_ptr() | v.data_ptr()) % 16 != 0:
        return "keys and values must have the same strides and begin at multiples of 16 bytes"
    if k.shape[3] != v.shape[3]:
        return f"keys and values must have one head dim, not {k.shape[3]} and {v.shape[3]}"
    return _layout_unsupported_reason(call.q.device, k.dtype, k.shape[3], call.block_size, strides)


@functools.cache
def _layout_unsupported_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, strides: _Sizes
) -> str | None:
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is not None:
        return reason
    block, token, head, _ = strides
    if block % token == 0 and (head % token == 0 or head < token) and token % 8 == 0:
        return None
    return f"a cache with strides {strides} is no matrix of tokens for TMA"


class _Address(NamedTuple):
    """The part of a tensor that a descriptor needs; keeping it does not keep the memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def describe_caches(call: Call, keys: int) -> tuple[TensorDescriptor, TensorDescriptor, Places]:
    """Describe a call's keys and values to TMA, for tiles of `keys` keys in parts that lie in one block each.

    Where a sequence lies within one block, tiles begin at any multiple of `keys`. The last one may reach into
    other memory of the cache, or past its end, where TMA reads 0.
    """
    k, v = call.layer.k, call.layer.v
    geometry = (k.dtype, k.shape, k.stride(), math.gcd(keys, call.block_size))
    k_matrix, places = _describe(k.data_ptr(), *geometry)
    v_matrix, _ = _describe(v.data_ptr(), *geometry)
    return k_matrix, v_matrix, places


# Room for the layers of a few models at a time.
@functools.lru_cache(maxsize=1024)
def _describe(
    pointer: int, dtype: torch.dtype, shape: _Sizes, strides: _Sizes, keys: int
) -> tuple[TensorDescriptor, Places]:
    """Describe the cache [N, B, KH, D] at an address as a matrix, copied in parts of `keys` keys."""
    num_blocks, block_size, num_heads, head_dim = shape
    block, token, head, _ = strides
    head_rows, head_columns = (head // token, 0) if head % token == 0 else (0, head)
    block_rows = block // token
    num_rows = (num_blocks - 1) * block_rows + (num_heads - 1) * head_rows + block_size
    size = [num_rows, (num_heads - 1) * head_columns + head_dim]
    part = [keys, _SWIZZLED_BYTES // dtype.itemsize]
    layout = gl.NVMMASharedLayout.get_default_for(part, _DTYPES[dtype])
    matrix = TensorDescriptor(_Address(pointer, dtype), size, [token, 1], part, layout)
    return matrix, Places(block_rows, head_rows, head_columns)
