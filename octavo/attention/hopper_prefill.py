"""Prefill on Hopper GPUs: as triton_prefill, with the matrix units and the copy engine driven by hand.

The compiler's own schedule lets the matrix units wait for each softmax. Here a tile's softmax runs while
the units multiply the previous tile's weights with its values:

    matrix units   [ q k1 ][ p0 v0 ][ q k2 ][ p1 v1 ] ...
    softmax                 [  p1  ]         [  p2  ] ...

Source: Shah et al., "FlashAttention-3", 2024 (overlap within a warpgroup).
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
from octavo.attention.triton_plan import RECORD, FatWork
from octavo.attention.triton_tiles import LN_2, Cache, Queries, Score, Shape

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_STAGES = gl.constexpr(2)


class Tiles(NamedTuple):
    """The cache as a matrix whose tiles the copy engine fetches: row and column of a (block, head, token).

    row = block * block_rows + head * head_rows + token, column = head * head_columns
    """

    block_rows: Any
    head_rows: Any
    head_columns: Any


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
        and work.shape.rows == 128
    )


def attend_fat(
    queries: Queries, cache: Cache, k_cache: Tensor, v_cache: Tensor, score: Score, units: Tensor, shape: Shape
) -> None:
    """Attend the fat units; arguments as the portable kernel takes them, and the caches as tensors."""
    num_blocks, block_size, num_heads, head_dim = k_cache.shape
    keys = 128 if block_size % 128 == 0 else 64
    _, token, head, _ = k_cache.stride()
    head_rows, head_columns = (head // token, 0) if head % token == 0 else (0, head)
    tiles = Tiles(k_cache.stride(0) // token, head_rows, head_columns)
    num_rows = (num_blocks - 1) * tiles.block_rows + (num_heads - 1) * head_rows + block_size
    size = [num_rows, (num_heads - 1) * head_columns + head_dim]
    layout = gl.NVMMASharedLayout.get_default_for([keys, head_dim], _DTYPES[k_cache.dtype])
    k, v = (TensorDescriptor(c, size, [token, 1], [keys, head_dim], layout) for c in (k_cache, v_cache))
    _attend_fat_kernel[(units.shape[0] * num_heads,)](
        queries, cache, k, v, tiles, score, units, shape, keys, num_warps=8, maxnreg=255
    )


@gluon.jit
def _attend_fat_kernel(queries, cache, k_matrix, v_matrix, tiles, score, units, shape, KEYS: gl.constexpr):
    """Attend one (unit, kv head)."""
    R: gl.constexpr = shape.rows
    D: gl.constexpr = shape.head_dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    program = gl.program_id(0)
    kv_head = program % shape.kv_heads
    record = units + program // shape.kv_heads * RECORD
    num_tokens = gl.load(record + 2)
    if num_tokens == 0:
        return
    table_row, token_begin = gl.load(record), gl.load(record + 1)
    kv_begin, kv_end = gl.load(record + 3), gl.load(record + 4)
    full_begin, full_end = gl.load(record + 5), gl.load(record + 6)
    first_tile, num_tiles = kv_begin // KEYS, gl.cdiv(kv_end, KEYS) - kv_begin // KEYS

    row = gl.arange(0, R, layout=S_ROW)
    valid = row < num_tokens * shape.group
    position = gl.load(queries.positions + token_begin + row // shape.group, mask=valid, other=-1)
    q = _load_queries(queries, token_begin, num_tokens, kv_head, shape, S_LAYOUT)
    table = cache.table + table_row.to(gl.int64) * cache.table_row
    k_tiles = gl.allocate_shared_memory(k_matrix.dtype, [_STAGES, KEYS, D], k_matrix.layout)
    v_tiles = gl.allocate_shared_memory(v_matrix.dtype, [_STAGES, KEYS, D], v_matrix.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
    fence_async_shared()

    top = gl.full([R], float("-inf"), gl.float32, layout=S_ROW)
    total = gl.full([R], 0.0, gl.float32, layout=S_ROW)
    values = gl.zeros([R, D], gl.float32, layout=O_LAYOUT)
    if num_tiles > 0:
        for stage in gl.static_range(_STAGES):
            _fetch(k_matrix, k_tiles, k_ready, tiles, table, kv_head, first_tile, stage, num_tiles, shape, KEYS)
            _fetch(v_matrix, v_tiles, v_ready, tiles, table, kv_head, first_tile, stage, num_tiles, shape, KEYS)
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), gl.zeros([R, KEYS], gl.float32, layout=S_LAYOUT), use_acc=False)
        _fetch(k_matrix, k_tiles, k_ready, tiles, table, kv_head, first_tile, _STAGES, num_tiles, shape, KEYS)
        weights, top, total, shrink = _softmax(s, top, total, position, first_tile, kv_end, score, shape, KEYS, True, q.dtype, O_LAYOUT)
        full = gl.minimum(num_tiles, full_end // KEYS - first_tile)
        left = 1
        if shape.windowed:
            left = gl.minimum(num_tiles, gl.maximum(1, gl.cdiv(full_begin, KEYS) - first_tile))
            for i in range(1, left):
                weights, values, top, total = _step(
                    i, q, weights, values, top, total, position, k_matrix, v_matrix, k_tiles, v_tiles, k_ready, v_ready,
                    tiles, table, kv_head, first_tile, num_tiles, kv_end, score, shape, KEYS, True)
        full = gl.maximum(left, full)
        for i in range(left, full):
            weights, values, top, total = _step(
                i, q, weights, values, top, total, position, k_matrix, v_matrix, k_tiles, v_tiles, k_ready, v_ready,
                tiles, table, kv_head, first_tile, num_tiles, kv_end, score, shape, KEYS, False)
        for i in range(full, num_tiles):
            weights, values, top, total = _step(
                i, q, weights, values, top, total, position, k_matrix, v_matrix, k_tiles, v_tiles, k_ready, v_ready,
                tiles, table, kv_head, first_tile, num_tiles, kv_end, score, shape, KEYS, True)
        last = num_tiles - 1
        mbarrier.wait(v_ready.index(last % _STAGES), (last // _STAGES) & 1)
        if kv_end % KEYS != 0:
            _clear_unseen(v_tiles.index(last % _STAGES), kv_end % KEYS, KEYS, D)
        values = warpgroup_mma(weights, v_tiles.index(last % _STAGES), values)
    _store_results(queries, values, top, total, token_begin, num_tokens, kv_head, shape, O_LAYOUT)


@gluon.jit
def _step(
    i, q, weights, values, top, total, position, k_matrix, v_matrix, k_tiles, v_tiles, k_ready, v_ready,
    tiles, table, kv_head, first_tile, num_tiles, kv_end, score, shape, KEYS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Multiply tile i's keys and tile i - 1's values; make tile i's weights meanwhile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = values.type.layout
    before = i - 1
    mbarrier.wait(k_ready.index(i % _STAGES), (i // _STAGES) & 1)
    s = warpgroup_mma(
        q, k_tiles.index(i % _STAGES).permute((1, 0)), gl.zeros([shape.rows, KEYS], gl.float32, layout=S_LAYOUT),
        use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before % _STAGES), (before // _STAGES) & 1)
    pending = warpgroup_mma(weights, v_tiles.index(before % _STAGES), values, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    _fetch(k_matrix, k_tiles, k_ready, tiles, table, kv_head, first_tile, i + _STAGES, num_tiles, shape, KEYS)
    new_weights, top, total, shrink = _softmax(
        s, top, total, position, first_tile + i, kv_end, score, shape, KEYS, MASKED, q.dtype, O_LAYOUT)
    values, weights = warpgroup_mma_wait(0, deps=(pending, weights))
    _fetch(v_matrix, v_tiles, v_ready, tiles, table, kv_head, first_tile, before + _STAGES, num_tiles, shape, KEYS)
    values = values * shrink[:, None]
    return new_weights, values, top, total


@gluon.jit
def _fetch(matrix, buffers, ready, tiles, table, kv_head, first_tile, i, num_tiles, shape, KEYS: gl.constexpr):
    """Start copying tile i to its buffer, if there is such a tile."""
    exists = i < num_tiles
    start = (first_tile + i) * KEYS
    block_id = gl.load(table + start // shape.block_size, mask=exists, other=0)
    row = block_id * tiles.block_rows + kv_head * tiles.head_rows + start % shape.block_size
    stage = i % _STAGES
    mbarrier.expect(ready.index(stage), matrix.block_type.nbytes, pred=exists)
    tma.async_copy_global_to_shared(
        matrix, [row, kv_head * tiles.head_columns], ready.index(stage), buffers.index(stage), pred=exists
    )


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
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * score.factor - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(weights, 1)
    operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return operand, new_top, total, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))


@gluon.jit
def _load_queries(queries, token_begin, num_tokens, kv_head, shape, S_LAYOUT: gl.constexpr):
    """Load the tile's queries as the left operand of a product, to stay in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    row = gl.arange(0, shape.rows, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    token = (token_begin + row // shape.group).to(gl.int64)
    head = kv_head * shape.group + row % shape.group
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    valid = row < num_tokens * shape.group
    q = gl.load(pointers, mask=valid[:, None], other=0.0)
    return gl.convert_layout(q, gl.DotOperandLayout(0, S_LAYOUT, 2))


@gluon.jit
def _clear_unseen(tile, num_seen, KEYS: gl.constexpr, D: gl.constexpr):
    """Zero the values behind the last key: a weight of 0 would not silence a NaN nobody has written."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    held = tile.load(LAYOUT)
    tile.store(gl.where((key < num_seen)[:, None], held, 0.0).to(held.dtype))
    fence_async_shared()


@gluon.jit
def _store_results(queries, values, top, total, token_begin, num_tokens, kv_head, shape, O_LAYOUT: gl.constexpr):
    """Normalise and write a tile's rows; 0 and -inf where nothing was seen."""
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
    row = gl.arange(0, shape.rows, layout=ROW)
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, O_LAYOUT))
    token = (token_begin + row // shape.group).to(gl.int64)
    at = token * (shape.group * shape.kv_heads) + kv_head * shape.group + row % shape.group
    valid = row < num_tokens * shape.group
    safe = gl.where(total > 0, total, 1.0)
    out = (values / safe[:, None]).to(queries.out.dtype.element_ty)
    gl.store(queries.out + (at * shape.head_dim)[:, None] + d[None, :], out, mask=valid[:, None])
    lse = gl.where(total > 0, (top + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(queries.lse + at, lse, mask=valid)
