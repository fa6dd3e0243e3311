# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# The kernel language is not typed.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.hopper_tiles import HALF, STAGES, Pipe, attend_item, key_tiles
from octavo.attention.options import ScoreOptions
from octavo.attention.triton_plan import RECORD, FatWork
from octavo.attention.triton_shapes import num_multiprocessors
from octavo.attention.triton_tiles import Cache, Queries, Score, Shape

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Matrices(NamedTuple):
    """Where a (block, head, token) lies in the caches seen as matrices for the copy engine.

    row = block * block_rows + head * head_rows + token, column = head * head_columns
    """

    block_rows: Any
    head_rows: Any
    head_columns: Any


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: ScoreOptions, work: FatWork) -> bool:
    """Say whether the kernel takes these arguments; the portable one takes all.

    Its products read keys and values where the copy engine leaves them, so it takes no float8 caches.
    """
    block, token, head, _ = k_cache.stride()
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in _DTYPES
        and k_cache.dtype == q.dtype
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
        and not work.row_invariant
        and work.shape.rows == 2 * HALF.value
    )


def attend_fat(
    queries: Queries,
    cache: Cache,
    k_cache: Tensor,
    v_cache: Tensor,
    score: Score,
    units: Tensor,
    shape: Shape,
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
        gl.allocate_shared_memory(k_matrix.dtype, [STAGES, KEYS, shape.head_dim], k_matrix.layout),
        gl.allocate_shared_memory(v_matrix.dtype, [STAGES, KEYS, shape.head_dim], v_matrix.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(STAGES):
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
        first_tile, num_tiles = key_tiles(record, KEYS)
        if (item < num_items) & (num_tiles > 0):
            table = cache.table + gl.load(record).to(gl.int64) * cache.table_row
            kv_head = item % shape.kv_heads
            for tile in range(first_tile, first_tile + num_tiles):
                start = tile * KEYS
                row = gl.load(table + start // shape.block_size) * matrices.block_rows
                row += kv_head * matrices.head_rows + start % shape.block_size
                at = [row, kv_head * matrices.head_columns]
                stage, phase = fetched % STAGES, (fetched // STAGES + 1) & 1
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
    _attend_half(queries, score, units, num_units, pipe, shape, KEYS, HALF)


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
                used = attend_item(queries, score, record, kv_head, pipe, used, shape, KEYS, FIRST_ROW)
