"""The work of one warpgroup of hopper/prefill.py: 64 rows of a unit against the unit's key tiles.

    tile                      n                                   n + 1
    wait      k_filled[n]          v_filled[n - 1]                k_filled[n + 1]   ...
    tensor    [ s = q k[n] ........][ o += w[n - 1] v[n - 1] ....][ s = q k[n + 1]  ...
    cores      both are started together, and run while the warpgroup goes on
    warps           wait for s, arrive k_free[n]
                    [ softmax of s -> w[n] ]
                                    wait for o, arrive v_free[n - 1], o *= shrink
    first tile     q k[0] and its softmax alone
    last tile      at the end w[last] v[last] alone, with values after the last key set to 0

[n] stands for stage n % STAGES of the pipe, whose buffers the fetching warp fills (pipe.py). Queries and
weights are operands in registers, keys and values in shared memory. A warpgroup without rows in a unit
(pass_item) must still arrive at the `free` barriers, since they count both warpgroups.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from octavo.attention.hopper.pipe import clear_outside, clear_unseen
from octavo.attention.triton.tiles import LN_2
from octavo.attention.triton.units import RECORD

import os

PINGPONG = gl.constexpr(int(os.environ.get("V_PINGPONG", "0")))
OVERLAP = gl.constexpr(int(os.environ.get("V_OVERLAP", "0")))
QSMEM = gl.constexpr(int(os.environ.get("V_QSMEM", "0")))
LATE = gl.constexpr(int(os.environ.get("V_LATE", "0")))
PREFETCH = gl.constexpr(int(os.environ.get("V_PREFETCH", "0")))
EPI = gl.constexpr(int(os.environ.get("V_EPI", "0")))
BACK = gl.constexpr(int(os.environ.get("V_BACK", "0")))
PACK = gl.constexpr(int(os.environ.get("V_PACK", "0")))
LAZY = gl.constexpr(int(os.environ.get("V_LAZY", "0")))

# Query rows of a warpgroup.
HALF = gl.constexpr(64)


class Gather(NamedTuple):
    """Scattered query tokens: entry i is row tokens[i] of q, and its partial result is row partial_ids[i].

    Rows of q from num_rows on do not exist.
    """

    tokens: Any
    partial_ids: Any
    num_rows: Any


class Item(NamedTuple):
    """What stays the same over an item's tiles; its first tile is number `used` of the pipe."""

    q: Any
    begin: Any
    end: Any
    score: Any
    first_tile: Any
    num_tiles: Any
    kv_begin: Any
    kv_end: Any
    pipe: Any
    used: Any
    shape: Any
    turn: Any


@gluon.jit
def key_tiles(record, KEYS: gl.constexpr):
    """Return a unit's first key tile and the number of its tiles; 0 for an unused record."""
    exists = gl.load(record + 2) > 0
    first = gl.load(record + 3) // KEYS
    return first, gl.where(exists, gl.cdiv(gl.load(record + 4), KEYS) - first, 0)


@gluon.jit
def _named(ASM: gl.constexpr, number):
    gl.inline_asm_elementwise(ASM, "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def open_turns(number, SECOND: gl.constexpr, shape):
    if PINGPONG == 2 and SECOND:
        _named("bar.arrive 8, 256; mov.u32 $0, 0;", number)


@gluon.jit
def begin_turn(turn, number, SECOND: gl.constexpr, shape):
    ON: gl.constexpr = shape.rows == 2 * HALF
    if PINGPONG == 1 and ON:
        if SECOND:
            mbarrier.wait(turn.index(1), number & 1)
        else:
            mbarrier.wait(turn.index(0), (number & 1) ^ 1)
    if PINGPONG == 2 and ON:
        if SECOND:
            _named("bar.sync 9, 256; mov.u32 $0, 0;", number)
        else:
            _named("bar.sync 8, 256; mov.u32 $0, 0;", number)


@gluon.jit
def end_turn(turn, number, SECOND: gl.constexpr, shape):
    ON: gl.constexpr = shape.rows == 2 * HALF
    if PINGPONG == 1 and ON:
        if SECOND:
            mbarrier.arrive(turn.index(0), count=1)
        else:
            mbarrier.arrive(turn.index(1), count=1)
    if PINGPONG == 2 and ON:
        if SECOND:
            _named("bar.arrive 8, 256; mov.u32 $0, 0;", number)
        else:
            _named("bar.arrive 9, 256; mov.u32 $0, 0;", number)


@gluon.jit
def pass_item(record, pipe, used, KEYS: gl.constexpr, turn, shape):
    """Free an item's tiles for a half that has no rows in it; return the number of the next tile."""
    _, num_tiles = key_tiles(record, KEYS)
    for i in range(0, num_tiles):
        stage, phase = (used + i) % pipe.stages, ((used + i) // pipe.stages) & 1
        begin_turn(turn, used + i, True, shape)
        end_turn(turn, used + i, True, shape)
        mbarrier.wait(pipe.k_filled.index(stage), phase)
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    return used + num_tiles


@gluon.jit
def attend_item(
    queries, gather, score, record, kv_head, pipe, used, shape,
    KEYS: gl.constexpr, FIRST_ROW: gl.constexpr, turn, q_tile, work, number,
):  # fmt: skip
    """Attend half of one item's rows, from the pipe's tile `used` on; return the number of the next tile."""
    D: gl.constexpr = shape.head_dim
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    token_begin, num_tokens, kv_end = gl.load(record + 1), gl.load(record + 2), gl.load(record + 4)
    first_tile, num_tiles = key_tiles(record, KEYS)
    row = FIRST_ROW + gl.arange(0, HALF, layout=ROW)
    token, exists = _query_rows(gather, token_begin + row // shape.group, row < num_tokens * shape.group)
    position = gl.load(queries.positions + token, mask=exists, other=-1)
    if PREFETCH == 1:
        async_copy.wait_group(0)
        fence_async_shared()
        q = q_tile
    else:
        q = _load_queries(queries, gather, token_begin, num_tokens, kv_head, shape, FIRST_ROW, S_LAYOUT, q_tile)
    top = gl.full([HALF], float("-inf"), gl.float32, layout=ROW)
    total = gl.full([HALF], 0.0, gl.float32, layout=ROW)
    if LAZY == 1:
        total = sum_in_thread(gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT), KEYS)
    values = gl.zeros([HALF, D], gl.float32, layout=O_LAYOUT)
    kv_begin = 0
    if shape.begins:
        kv_begin = gl.load(record + 3)
    # The keys that each row sees.
    row_end = gl.minimum(position + 1, kv_end)
    row_begin = gl.zeros_like(row_end) + kv_begin
    if shape.windowed:
        row_begin = gl.maximum(row_begin, position - score.window + 1)
    SECOND: gl.constexpr = FIRST_ROW > 0
    item = Item(q, row_begin, row_end, score, first_tile, num_tiles, kv_begin, kv_end, pipe, used, shape, turn)
    if num_tiles > 0:
        stage = used % pipe.stages
        begin_turn(turn, used, SECOND, shape)
        mbarrier.wait(pipe.k_filled.index(stage), (used // pipe.stages) & 1)
        zero = gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(q, pipe.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        end_turn(turn, used, SECOND, shape)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        # There is no sum yet that the first tile's maximum could shrink.
        weights, top, total, _ = _softmax(s, top, total, 0, item, KEYS, True, O_LAYOUT)
        if shape.begins:  # noqa: SIM102  (decided when compiled)
            if (kv_begin % KEYS != 0) & ((BACK == 0) | (num_tiles == 1)):
                mbarrier.wait(pipe.v_filled.index(stage), (used // pipe.stages) & 1)
                end = kv_end - first_tile * KEYS
                clear_outside(pipe.v.index(stage), kv_begin % KEYS, end, KEYS, 4)
        if BACK == 1:  # noqa: SIM102
            if kv_end % KEYS != 0:
                mbarrier.wait(pipe.v_filled.index(stage), (used // pipe.stages) & 1)
                clear_unseen(pipe.v.index(stage), kv_end % KEYS, KEYS, 4)
        weights, values, top, total = _attend_rest(weights, values, top, total, item, record, KEYS, SECOND, shape)
        last = used + num_tiles - 1
        stage = last % pipe.stages
        mbarrier.wait(pipe.v_filled.index(stage), (last // pipe.stages) & 1)
        if BACK == 0:
            if kv_end % KEYS != 0:
                clear_unseen(pipe.v.index(stage), kv_end % KEYS, KEYS, 4)
        elif shape.begins:
            if kv_begin % KEYS != 0:
                if num_tiles > 1:
                    clear_outside(pipe.v.index(stage), kv_begin % KEYS, KEYS, KEYS, 4)
        operand = unpacked(weights, q.dtype, KEYS, O_LAYOUT)
        values = warpgroup_mma(operand, pipe.v.index(stage), values, is_async=True)
        if PREFETCH == 1:
            fetch_queries(queries, gather, work, number + 1, q_tile, shape, FIRST_ROW)
            # Keeps what is above above.
            mbarrier.wait(pipe.v_filled.index(stage), (last // pipe.stages) & 1)
        values, _ = warpgroup_mma_wait(0, deps=(values, operand))
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    elif PREFETCH == 1:
        fetch_queries(queries, gather, work, number + 1, q_tile, shape, FIRST_ROW)
    if LAZY == 1:
        total = gl.convert_layout(gl.sum(total, 1), ROW)
    _store_results(
        queries, gather, values, top, total, token_begin, num_tokens, kv_head, shape, FIRST_ROW, O_LAYOUT
    )
    return used + num_tiles


@gluon.jit
def sum_in_thread(x, KEYS: gl.constexpr):
    return gl.sum(gl.sum(gl.reshape(x, [HALF, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def unpacked(weights, dtype: gl.constexpr, KEYS: gl.constexpr, O_LAYOUT: gl.constexpr):
    if PACK == 1:
        low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], (gl.int16, gl.int16), is_pure=True, pack=1)
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
        both = gl.reshape(gl.join(low, high), [HALF, KEYS])
        return gl.convert_layout(both, gl.DotOperandLayout(0, O_LAYOUT, 2))
    else:
        return weights


@gluon.jit
def which_item(turn):
    """Return the (unit, kv head) of a turn: forth and back through the programs, to balance their work."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if turn % 2 == 1:
        program = num_programs - 1 - program
    return turn * num_programs + program


@gluon.jit
def fetch_queries(queries, gather, work, turn, q_tile, shape, FIRST_ROW: gl.constexpr):
    """Start the copy of a turn's queries to shared memory."""
    units, num_items, turns = work
    item = which_item(turn)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if item < num_items:
        record = units + item // shape.kv_heads * RECORD
        kv_head = item % shape.kv_heads
        row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
        token, exists = _query_rows(
            gather, gl.load(record + 1) + row // shape.group, row < gl.load(record + 2) * shape.group
        )
        head = kv_head * shape.group + row % shape.group
        pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
        async_copy.async_copy_global_to_shared(q_tile, pointers, mask=exists[:, None])
    async_copy.commit_group()


@gluon.jit
def _attend_rest(weights, values, top, total, item, record, KEYS: gl.constexpr, SECOND: gl.constexpr, shape):
    """Attend an item's tiles after the first; mask only those that some row sees in part."""
    first_tile, num_tiles = key_tiles(record, KEYS)
    full_begin, full_end = gl.load(record + 5), gl.load(record + 6)
    if BACK == 1:
        right = gl.maximum(1, num_tiles - gl.maximum(0, full_end // KEYS - first_tile))
        left = num_tiles
        if item.shape.windowed or item.shape.begins:
            left = gl.maximum(right, num_tiles - gl.maximum(0, gl.cdiv(full_begin, KEYS) - first_tile))
        for i in range(1, gl.minimum(right, num_tiles)):
            weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True, SECOND, shape)
        for i in range(right, left):
            weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, False, SECOND, shape)
        if item.shape.windowed or item.shape.begins:
            for i in range(left, num_tiles):
                weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True, SECOND, shape)
    else:
        weights, values, top, total = _forth(
            weights, values, top, total, item, KEYS, SECOND, shape, first_tile, num_tiles, full_begin, full_end
        )
    return weights, values, top, total


@gluon.jit
def _forth(
    weights, values, top, total, item, KEYS: gl.constexpr, SECOND: gl.constexpr, shape, first_tile, num_tiles, full_begin, full_end
):
    left = 1
    if item.shape.windowed or item.shape.begins:
        left = gl.minimum(num_tiles, gl.maximum(1, gl.cdiv(full_begin, KEYS) - first_tile))
        for i in range(1, left):
            weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True, SECOND, shape)
    right = gl.maximum(left, gl.minimum(num_tiles, full_end // KEYS - first_tile))
    for i in range(left, right):
        weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, False, SECOND, shape)
    for i in range(right, num_tiles):
        weights, values, top, total = _step(i, weights, values, top, total, item, KEYS, True, SECOND, shape)
    return weights, values, top, total


@gluon.jit
def _step(i, weights, values, top, total, item, KEYS: gl.constexpr, MASKED: gl.constexpr, SECOND: gl.constexpr, shape):
    """Start the products with an item's i-th keys and, by the weights of tile i - 1, with its values."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = values.type.layout
    pipe = item.pipe
    now, before = item.used + i, item.used + i - 1
    k_stage, v_stage = now % pipe.stages, before % pipe.stages
    begin_turn(item.turn, now, SECOND, shape)
    mbarrier.wait(pipe.k_filled.index(k_stage), (now // pipe.stages) & 1)
    zero = gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(item.q, pipe.k.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(pipe.v_filled.index(v_stage), (before // pipe.stages) & 1)
    operand = unpacked(weights, item.q.dtype, KEYS, O_LAYOUT)
    pending = warpgroup_mma(operand, pipe.v.index(v_stage), values, is_async=True)
    end_turn(item.turn, now, SECOND, shape)
    s = warpgroup_mma_wait(1, deps=(s,))
    if LATE == 0:
        mbarrier.arrive(pipe.k_free.index(k_stage), count=1)
    new_weights, top, total, shrink = _softmax(s, top, total, i, item, KEYS, MASKED, O_LAYOUT)
    if OVERLAP == 1:
        mbarrier.wait(pipe.v_filled.index(v_stage), (before // pipe.stages) & 1)
    # The product reads the old weights until here: a dependency, so that the compiler keeps their registers.
    values, _ = warpgroup_mma_wait(0, deps=(pending, operand))
    if LATE == 1:
        mbarrier.arrive(pipe.k_free.index(k_stage), count=1)
    mbarrier.arrive(pipe.v_free.index(v_stage), count=1)
    return new_weights, values * shrink[:, None], top, total


@gluon.jit
def _softmax(
    s, top, total, i, item, KEYS: gl.constexpr, MASKED: gl.constexpr, O_LAYOUT: gl.constexpr
):  # fmt: skip
    """Fold the i-th tile's scores into the maximum and sum: (weights as an operand, top, total, shrink)."""
    factor = item.score.factor
    if MASKED:
        tile = item.first_tile + i
        if BACK == 1:
            tile = item.first_tile + item.num_tiles - 1 - i
        key = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        visible = key[None, :] < item.end[:, None]
        if item.shape.windowed or item.shape.begins:
            visible = visible & (key[None, :] >= item.begin[:, None])
        s = gl.where(visible, s, float("-inf"))
    if LAZY == 1:
        in_thread = gl.max(gl.max(gl.reshape(s, [HALF, KEYS // 8, 4, 2]), 3), 1)
        new_top = gl.maximum(top, gl.convert_layout(gl.max(in_thread, 1), top.type.layout) * factor)
    else:
        new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = new_top
    if MASKED:
        # A row without a visible key so far keeps top = -inf; base 0 makes its weights exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * factor - base[:, None])
    shrink = gl.exp2(top - base)
    if LAZY == 1:
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sum_in_thread(weights, KEYS)
    else:
        total = total * shrink + gl.sum(weights, 1)
    if PACK == 1:
        low, high = gl.split(gl.reshape(weights, [HALF, KEYS // 2, 2]))
        if item.q.dtype == gl.bfloat16:
            operand = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)
        else:
            operand = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)
    else:
        operand = gl.convert_layout(weights.to(item.q.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return operand, new_top, total, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))


@gluon.jit
def _query_rows(gather, entry, valid):
    """Return each entry's row of q [R] int64 and whether it exists [R]; without gather, the entry itself."""
    if gather is None:
        return entry.to(gl.int64), valid
    else:
        token = gl.load(gather.tokens + entry, mask=valid, other=0)
        return token.to(gl.int64), valid & (token < gather.num_rows)


@gluon.jit
def _result_rows(gather, entry, valid):
    """Return each entry's row of the results [R] int64; without gather, the entry itself."""
    if gather is None:
        return entry.to(gl.int64)
    else:
        return gl.load(gather.partial_ids + entry, mask=valid, other=0).to(gl.int64)


@gluon.jit
def _load_queries(
    queries, gather, token_begin, num_tokens, kv_head, shape,
    FIRST_ROW: gl.constexpr, S_LAYOUT: gl.constexpr, q_tile,
):  # fmt: skip
    """Load a half tile's queries as the left operand of a product, to stay in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    token, exists = _query_rows(gather, token_begin + row // shape.group, row < num_tokens * shape.group)
    head = kv_head * shape.group + row % shape.group
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    loaded = gl.load(pointers, mask=exists[:, None], other=0.0)
    if QSMEM == 1:
        q_tile.store(loaded)
        fence_async_shared()
        return q_tile
    else:
        return gl.convert_layout(loaded, gl.DotOperandLayout(0, S_LAYOUT, 2))


@gluon.constexpr_function
def _mid_layout(o_layout, head_dim, dtype):
    if EPI.value == 0 or dtype.primitive_bitwidth != 16:
        return o_layout
    columns = [[0, c] for c in (32, 64) if c < head_dim]
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 16], *columns],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, head_dim],
    )


@gluon.constexpr_function
def _out_layout(o_layout, head_dim, dtype):
    if EPI.value == 0 or dtype.primitive_bitwidth != 16:
        return o_layout
    columns = [[0, c] for c in (32, 64) if c < head_dim]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *columns, [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, head_dim],
    )


@gluon.jit
def _store_results(
    queries, gather, values, top, total, token_begin, num_tokens, kv_head, shape,
    FIRST_ROW: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalise and write a half tile's rows; out 0 and lse -inf where no key was visible."""
    OUT: gl.constexpr = _out_layout(O_LAYOUT, shape.head_dim, queries.out.dtype.element_ty)
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    top, total = gl.convert_layout(top, ROW), gl.convert_layout(total, ROW)
    row = FIRST_ROW + gl.arange(0, HALF, layout=ROW)
    exists = row < num_tokens * shape.group
    result = _result_rows(gather, token_begin + row // shape.group, exists)
    at = result * (shape.group * shape.kv_heads) + kv_head * shape.group + row % shape.group
    safe = gl.where(total > 0, total, 1.0)
    out = (values * (1.0 / safe)[:, None]).to(queries.out.dtype.element_ty)
    out = gl.convert_layout(gl.convert_layout(out, _mid_layout(O_LAYOUT, shape.head_dim, queries.out.dtype.element_ty)), OUT)
    out_row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    out_d = gl.arange(0, shape.head_dim, layout=gl.SliceLayout(0, OUT))
    out_exists = out_row < num_tokens * shape.group
    out_result = _result_rows(gather, token_begin + out_row // shape.group, out_exists)
    out_at = out_result * (shape.group * shape.kv_heads) + kv_head * shape.group + out_row % shape.group
    gl.store(queries.out + (out_at * shape.head_dim)[:, None] + out_d[None, :], out, mask=out_exists[:, None])
    lse = gl.where(total > 0, (top + gl.log2(safe)) * LN_2, float("-inf"))
    gl.store(queries.lse + at, lse, mask=exists)
