# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# The kernel language is not typed.
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

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.hopper.pipe import Places, Source, fetch_tiles, make_pipe
from octavo.attention.hopper.tiles import HALF, Gather, attend_item, key_tiles, pass_item
from octavo.attention.options import ScoreOptions
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton.arguments import Call
from octavo.attention.triton.shapes import HOPPER_NODE_SHAPE, HOPPER_PROMPT_SHAPE, TileShape, fits_hopper
from octavo.attention.triton.step_map import FatWork
from octavo.attention.triton.units import RECORD
from octavo.gpu.device import num_multiprocessors

_Sizes = tuple[int, ...]
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: ScoreOptions, work: FatWork) -> bool:
    """Say whether the kernel takes these arguments; the portable one takes all."""
    return (
        takes(q, k_cache, v_cache, options)
        and work.num_parts == 1
        and not work.row_invariant
        and work.shape.rows == 2 * HALF.value
    )


def can_attend_nodes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: ScoreOptions, forest: DeviceForest
) -> bool:
    """Say whether the kernel takes the fat units of a forest; the portable one takes all."""
    return takes(q, k_cache, v_cache, options) and forest.fat_tile(decodes=False) == HOPPER_NODE_SHAPE


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: ScoreOptions) -> bool:
    """Say whether the Hopper kernels take these: no float8, as products read what the copy engine wrote."""
    dtype, strides = k_cache.dtype, k_cache.stride()
    return (
        options.softcap == 0
        and options.alibi_slopes is None
        and dtype == q.dtype
        and strides == v_cache.stride()
        and (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
        and _takes_cache(q.device, dtype, k_cache.shape, strides)
    )


@functools.cache
def _takes_cache(device: torch.device, dtype: torch.dtype, shape: _Sizes, strides: _Sizes) -> bool:
    block, token, head, _ = strides
    return (
        fits_hopper(device, dtype, head_dim=shape[3], block_size=shape[1])
        and block % token == 0
        and (head % token == 0 or head < token)
        and token % 8 == 0
    )


def attend_fat(call: Call, units: Tensor) -> None:
    """Attend the fat units [U, 8]."""
    wide = call.k_cache.shape[1] % HOPPER_PROMPT_SHAPE.keys == 0
    _attend(call, None, units, HOPPER_PROMPT_SHAPE if wide else HOPPER_NODE_SHAPE)


def attend_nodes(call: Call, forest: DeviceForest, *, decodes: bool) -> None:
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
        *(call.queries, gather, call.cache, *describe_caches(call, tile.keys), call.score),
        *(units, units.shape[0], call.shape(tile), tile.keys, tile.num_stages, keys_are_old),
        num_warps=4,
        maxnreg=tile.max_registers,
        launch_pdl=gather is not None,
    )


class _Address(NamedTuple):
    """What a descriptor needs of a tensor, so that keeping it does not keep the memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def describe_caches(call: Call, keys: int) -> tuple[TensorDescriptor, TensorDescriptor, Places]:
    """Describe a call's caches to the copy engine, in tiles of so many keys, which divide a block."""
    geometry = (call.k_cache.dtype, call.k_cache.shape, call.k_cache.stride(), keys)
    k, places = _describe(call.k_cache.data_ptr(), *geometry)
    v, _ = _describe(call.v_cache.data_ptr(), *geometry)
    return k, v, places


# Room for the layers of a few models at a time.
@functools.lru_cache(maxsize=1024)
def _describe(
    pointer: int, dtype: torch.dtype, shape: _Sizes, strides: _Sizes, keys: int
) -> tuple[TensorDescriptor, Places]:
    """Describe the cache [N, B, KH, D] at an address as a matrix, to be copied in tiles of so many keys."""
    num_blocks, block_size, num_heads, head_dim = shape
    block, token, head, _ = strides
    head_rows, head_columns = (head // token, 0) if head % token == 0 else (0, head)
    block_rows = block // token
    num_rows = (num_blocks - 1) * block_rows + (num_heads - 1) * head_rows + block_size
    size = [num_rows, (num_heads - 1) * head_columns + head_dim]
    tile = [keys, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[dtype])
    matrix = TensorDescriptor(_Address(pointer, dtype), size, [token, 1], tile, layout)
    return matrix, Places(block_rows, head_rows, head_columns)


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
