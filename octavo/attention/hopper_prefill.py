"""Prefill on Hopper GPUs: as triton_prefill, with the matrix units and the copy engine driven by hand.

Left to the compiler's schedule the matrix units idle during each softmax. Here one warp fetches tiles of
keys and values, and two warpgroups, each with half of the query rows, use them. They share the tiles but
never wait for each other: while one makes weights, the other has the matrix units.

    warpgroup 0   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 | p1 v1 ][ softmax ...
    warpgroup 1                   [ q k1 | p0 v0 ][ softmax -> p1 ][ q k2 ...

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.options import ScoreOptions
from octavo.attention.triton_plan import RECORD, FatWork, num_multiprocessors
from octavo.attention.triton_tiles import LN_2, Cache, Queries, Score, Shape

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Query rows of a warpgroup, and buffers each for keys and values.
_HALF = gl.constexpr(64)
_STAGES = gl.constexpr(3)


class Matrices(NamedTuple):
    """Where a (block, head, token) lies in the caches seen as matrices for the copy engine.

    row = block * block_rows + head * head_rows + token, column = head * head_columns
    """

    block_rows: Any
    head_rows: Any
    head_columns: Any


class Pipe(NamedTuple):
    """Buffers in shared memory, and for each the barriers 'filled' (by the copy engine) and 'free' again."""

    k: Any
    v: Any
    k_filled: Any
    v_filled: Any
    k_free: Any
    v_free: Any


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: ScoreOptions, work: FatWork) -> bool:
    """Say whether the kernel takes these arguments; the portable one takes all."""
    block, token, head, _ = k_cache.stride()
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in _DTYPES
        and k_cache.shape[3] in (64, 128)
        and k_cache.shape[1] % 64 == 0
        and k_cache.stride() == v_cache.stride()
        and block % token == 0
        and (head % token == 0 or head < token)
        and token % 8 == 0
        and (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
        and options.softcap == 0
        and options.alibi_slopes is None
        and work.num_parts == 1
        and work.shape.rows == 2 * _HALF.value
    )


def attend_fat(
    queries: Queries, cache: Cache, k_cache: Tensor, v_cache: Tensor, score: Score, units: Tensor, shape: Shape
) -> None:
    """Attend the fat units; arguments as the portable kernel takes them, and the caches as tensors."""
    num_blocks, block_size, num_heads, head_dim = k_cache.shape
    block, token, head, _ = k_cache.stride()
    head_rows, head_columns = (head // token, 0) if head % token == 0 else (0, head)
    matrices = Matrices(block // token, head_rows, head_columns)
    num_rows = (num_blocks - 1) * matrices.block_rows + (num_heads - 1) * head_rows + block_size
    size = [num_rows, (num_heads - 1) * head_columns + head_dim]
    tile = [128 if block_size % 128 == 0 else 64, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[k_cache.dtype])
    k, v = (TensorDescriptor(c, size, [token, 1], tile, layout) for c in (k_cache, v_cache))
    # 168 registers fill the multiprocessor; the fetching warp cedes most of its share to the others.
    _attend_fat_kernel[(num_multiprocessors(k_cache.device),)](
        *(queries, cache, k, v, matrices, score, units, units.shape[0], shape, tile[0]),
        num_warps=4,
        maxnreg=168,
    )


@gluon.jit(do_not_specialize=["num_units"])
def _attend_fat_kernel(
    queries, cache, k_matrix, v_matrix, matrices, score, units, num_units, shape, KEYS: gl.constexpr
):
    """Attend the (unit, kv head)s of this program's turns."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    pipe = Pipe(
        gl.allocate_shared_memory(k_matrix.dtype, [_STAGES, KEYS, shape.head_dim], k_matrix.layout),
        gl.allocate_shared_memory(v_matrix.dtype, [_STAGES, KEYS, shape.head_dim], v_matrix.layout),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(_STAGES):
        mbarrier.init(pipe.k_filled.index(stage), count=1)
        mbarrier.init(pipe.v_filled.index(stage), count=1)
        mbarrier.init(pipe.k_free.index(stage), count=2)
        mbarrier.init(pipe.v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend_first_half, (queries, score, units, num_units, pipe, shape, KEYS)),
            (_attend_second_half, (queries, score, units, num_units, pipe, shape, KEYS)),
            (_fetch, (cache, k_matrix, v_matrix, matrices, units, num_units, pipe, shape, KEYS)),
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
def _key_tiles(record, KEYS: gl.constexpr):
    """First key tile of a unit and how many there are; none for an unused record."""
    exists = gl.load(record + 2) > 0
    first = gl.load(record + 3) // KEYS
    return first, gl.where(exists, gl.cdiv(gl.load(record + 4), KEYS) - first, 0)


@gluon.jit
def _fetch(
    cache, k_matrix, v_matrix, matrices, units, num_units, pipe, shape, KEYS: gl.constexpr
):  # fmt: skip
    """Copy the key and value tiles of all turns, as soon as buffers are free."""
    num_items = num_units * shape.kv_heads
    fetched = 0
    for turn in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        item = _item(turn)
        # A turn beyond the last item looks at that one and finds nothing to do.
        record = units + gl.minimum(item // shape.kv_heads, num_units - 1) * RECORD
        first_tile, num_tiles = _key_tiles(record, KEYS)
        if (item < num_items) & (num_tiles > 0):
            table = cache.table + gl.load(record).to(gl.int64) * cache.table_row
            kv_head = item % shape.kv_heads
            for tile in range(first_tile, first_tile + num_tiles):
                start = tile * KEYS
                row = gl.load(table + start // shape.block_size) * matrices.block_rows
                row += kv_head * matrices.head_rows + start % shape.block_size
                at = [row, kv_head * matrices.head_columns]
                stage, phase = fetched % _STAGES, (fetched // _STAGES + 1) & 1
                mbarrier.wait(pipe.k_free.index(stage), phase)
                mbarrier.expect(pipe.k_filled.index(stage), k_matrix.block_type.nbytes)
                tma.async_copy_global_to_shared(k_matrix, at, pipe.k_filled.index(stage), pipe.k.index(stage))
                mbarrier.wait(pipe.v_free.index(stage), phase)
                mbarrier.expect(pipe.v_filled.index(stage), v_matrix.block_type.nbytes)
                tma.async_copy_global_to_shared(v_matrix, at, pipe.v_filled.index(stage), pipe.v.index(stage))
                fetched += 1


@gluon.jit
def _attend_first_half(queries, score, units, num_units, pipe, shape, KEYS: gl.constexpr):
    _attend_half(queries, score, units, num_units, pipe, shape, KEYS, 0)


@gluon.jit
def _attend_second_half(queries, score, units, num_units, pipe, shape, KEYS: gl.constexpr):
    _attend_half(queries, score, units, num_units, pipe, shape, KEYS, _HALF)


@gluon.jit
def _attend_half(
    queries, score, units, num_units, pipe, shape, KEYS: gl.constexpr, FIRST_ROW: gl.constexpr
):  # fmt: skip
    """Attend half of the rows of all turns, from FIRST_ROW on."""
    num_items = num_units * shape.kv_heads
    used = 0
    for turn in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        item = _item(turn)
        if item < num_items:
            record = units + item // shape.kv_heads * RECORD
            if gl.load(record + 2) > 0:
                kv_head = item % shape.kv_heads
                used = _attend_item(queries, score, record, kv_head, pipe, used, shape, KEYS, FIRST_ROW)


@gluon.jit
def _attend_item(
    queries, score, record, kv_head, pipe, used, shape, KEYS: gl.constexpr, FIRST_ROW: gl.constexpr
):
    """Attend half of one item's rows, from the pipe's tile number `used` on; returns the number after it."""
    D: gl.constexpr = shape.head_dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    token_begin, num_tokens, kv_end = gl.load(record + 1), gl.load(record + 2), gl.load(record + 4)
    first_tile, num_tiles = _key_tiles(record, KEYS)
    row = FIRST_ROW + gl.arange(0, _HALF, layout=ROW)
    exists = row < num_tokens * shape.group
    position = gl.load(queries.positions + token_begin + row // shape.group, mask=exists, other=-1)
    q = _load_queries(queries, token_begin, num_tokens, kv_head, shape, FIRST_ROW, S_LAYOUT)
    top = gl.full([_HALF], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([_HALF], 0.0, gl.float32, layout=ROW)
    values = gl.zeros([_HALF, D], gl.float32, layout=O_LAYOUT)
    if num_tiles > 0:
        stage = used % _STAGES
        mbarrier.wait(pipe.k_filled.index(stage), (used // _STAGES) & 1)
        zero = gl.zeros([_HALF, KEYS], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(q, pipe.k.index(stage).permute((1, 0)), zero, use_acc=False)
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        weights, top, total, shrink = _softmax(
            s, top, total, position, first_tile, kv_end, score, shape, KEYS, True, q.dtype, O_LAYOUT
        )
        weights, values, top, total = _attend_rest(
            q, weights, values, top, total, position, score, record, pipe, used, shape, KEYS
        )
        last = used + num_tiles - 1
        stage = last % _STAGES
        mbarrier.wait(pipe.v_filled.index(stage), (last // _STAGES) & 1)
        if kv_end % KEYS != 0:
            _clear_unseen(pipe.v.index(stage), kv_end % KEYS, KEYS, D)
        values = warpgroup_mma(weights, pipe.v.index(stage), values)
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    _store_results(queries, values, top, total, token_begin, num_tokens, kv_head, shape, FIRST_ROW, O_LAYOUT)
    return used + num_tiles


@gluon.jit
def _attend_rest(
    q, weights, values, top, total, position, score, record, pipe, used, shape, KEYS: gl.constexpr
):  # fmt: skip
    """Attend to an item's tiles after the first, masking only those that some row sees in part."""
    first_tile, num_tiles = _key_tiles(record, KEYS)
    full_begin, full_end, kv_end = gl.load(record + 5), gl.load(record + 6), gl.load(record + 4)
    left = 1
    if shape.windowed:
        left = gl.minimum(num_tiles, gl.maximum(1, gl.cdiv(full_begin, KEYS) - first_tile))
        for i in range(1, left):
            weights, values, top, total = _step(
                i, q, weights, values, top, total, position, score, first_tile, kv_end, pipe, used, shape, KEYS, True
            )
    right = gl.maximum(left, gl.minimum(num_tiles, full_end // KEYS - first_tile))
    for i in range(left, right):
        weights, values, top, total = _step(
            i, q, weights, values, top, total, position, score, first_tile, kv_end, pipe, used, shape, KEYS, False
        )
    for i in range(right, num_tiles):
        weights, values, top, total = _step(
            i, q, weights, values, top, total, position, score, first_tile, kv_end, pipe, used, shape, KEYS, True
        )
    return weights, values, top, total


@gluon.jit
def _step(
    i, q, weights, values, top, total, position, score, first_tile, kv_end, pipe, used, shape,
    KEYS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Multiply an item's i-th tile of keys and, with the weights made before, the values before it."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    now, before = used + i, used + i - 1
    k_stage, v_stage = now % _STAGES, before % _STAGES
    mbarrier.wait(pipe.k_filled.index(k_stage), (now // _STAGES) & 1)
    zero = gl.zeros([_HALF, KEYS], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(q, pipe.k.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(pipe.v_filled.index(v_stage), (before // _STAGES) & 1)
    pending = warpgroup_mma(weights, pipe.v.index(v_stage), values, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(pipe.k_free.index(k_stage), count=1)
    new_weights, top, total, shrink = _softmax(
        s, top, total, position, first_tile + i, kv_end, score, shape, KEYS, MASKED, q.dtype, values.type.layout
    )
    # The old weights are read until here; named, so that the compiler keeps their registers.
    values, weights = warpgroup_mma_wait(0, deps=(pending, weights))
    mbarrier.arrive(pipe.v_free.index(v_stage), count=1)
    return new_weights, values * shrink[:, None], top, total


@gluon.jit
def _softmax(
    s, top, total, position, tile, kv_end, score, shape, KEYS: gl.constexpr, MASKED: gl.constexpr,
    DTYPE: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fold scores into the running maximum and sum: (weights as an operand, top, total, shrink)."""
    if MASKED:
        key = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        visible = (key[None, :] <= position[:, None]) & (key < kv_end)[None, :]
        if shape.windowed:
            visible = visible & (key[None, :] > position[:, None] - score.window)
        s = gl.where(visible, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * score.factor)
    base = new_top
    if MASKED:
        # A row that has seen nothing keeps -inf; from 0 its weights are exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * score.factor - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(weights, 1)
    operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return operand, new_top, total, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))


@gluon.jit
def _load_queries(
    queries, token_begin, num_tokens, kv_head, shape, FIRST_ROW: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """Load a half tile's queries as the left operand of a product, to stay in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = FIRST_ROW + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    token = (token_begin + row // shape.group).to(gl.int64)
    head = kv_head * shape.group + row % shape.group
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    exists = row < num_tokens * shape.group
    return gl.convert_layout(gl.load(pointers, mask=exists[:, None], other=0.0), gl.DotOperandLayout(0, S_LAYOUT, 2))


@gluon.jit
def _clear_unseen(tile, num_seen, KEYS: gl.constexpr, D: gl.constexpr):
    """Zero the values behind the last key: a weight of 0 would not silence a NaN nobody has written.

    Both warpgroups do it, each before its own product; what they write is the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where((key < num_seen)[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()


@gluon.jit
def _store_results(
    queries, values, top, total, token_begin, num_tokens, kv_head, shape,
    FIRST_ROW: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalise and write a half tile's rows; 0 and -inf where nothing was seen."""
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
    row = FIRST_ROW + gl.arange(0, _HALF, layout=ROW)
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, O_LAYOUT))
    token = (token_begin + row // shape.group).to(gl.int64)
    at = token * (shape.group * shape.kv_heads) + kv_head * shape.group + row % shape.group
    exists = row < num_tokens * shape.group
    safe = gl.where(total > 0, total, 1.0)
    out = (values / safe[:, None]).to(queries.out.dtype.element_ty)
    gl.store(queries.out + (at * shape.head_dim)[:, None] + d[None, :], out, mask=exists[:, None])
    lse = gl.where(total > 0, (top + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(queries.lse + at, lse, mask=exists)
