"""The work of one warpgroup of tma_prefill.py: 64 rows of a unit against its key tiles, last to first.

    tile                      n                                   n + 1
    wait      k_filled[n]          v_filled[n - 1]                k_filled[n + 1]   ...
    tensor    [ s = q k[n] ........][ o += w[n - 1] v[n - 1] ....][ s = q k[n + 1]  ...
    cores      both are started together, in the warpgroup's turn, and run while it goes on
    warps           wait for s, arrive k_free[n]
                    [ softmax of s -> w[n] ]
                                    wait for o, arrive v_free[n - 1], o *= shrink
    first tile     q k[0] and its softmax by itself, then values after the last key set to 0
    last tile      at the end w[last] v[last] by itself, beside it the copy of the next turn's queries

[n] stands for stage n % STAGES of the pipe, whose buffers the fetching warp fills (pipe.py). Weights are
operands in registers; queries, keys and values in shared memory. A warpgroup without rows in a unit
(pass_item) must still arrive at the `free` barriers, since they count both warpgroups.

A sequence's last tile is the first, since the causal mask hides part of that one from nearly every unit:
masking costs instructions, and the first tile runs by itself and is masked anyway.

Two warpgroups take turns at the tensor cores (ping-pong), so that one's softmax runs beside the other's
products. Without turns both start their products together, wait for them together, and then leave the tensor
cores idle during their softmax.

    warpgroup 0   sync 8 -> start products -> arrive 9 -> softmax .......... sync 8 -> ...
    warpgroup 1                               sync 9 -> start products -> arrive 8 -> softmax

8 and 9 are hardware barriers, which Triton does not use; each completes with one warpgroup that waits at it
and one that goes on. Each warpgroup has one turn per tile of keys, also for tiles that it passes over.

A tile's weights wait while the next tile's scores are computed, two numbers in each register. As a tensor of
16-bit numbers they would be taken apart and put together again at both ends of the loop: 64 instructions a
tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from octavo.attention.hopper.pipe import clear_outside
from octavo.attention.hopper.prefill_queries import (
    HALF,
    fetch_next_queries,
    first_row,
    key_tiles,
    named_barrier,
    num_warpgroups,
    own_dim,
    own_half,
    query_rows,
    store_results,
    wait_for_queries,
)


class Item(NamedTuple):
    """What stays the same over an item's tiles.

    q: queries in shared memory.
    begin, end: [HALF] int32, the keys that each row sees.
    factor: of scores.
    last_tile: of the item's keys; it is the first to be attended, and number `used` of the pipe.
    """

    q: Any
    begin: Any
    end: Any
    factor: Any
    last_tile: Any
    pipe: Any
    used: Any


@gluon.jit
def pass_item(record, pipe, used, shape, KEYS: gl.constexpr, SECOND: gl.constexpr):
    """Free an item's tiles for a half that has no rows in it; return the number of the next tile."""
    ONE_GROUP: gl.constexpr = num_warpgroups(shape.rows, shape.head_dim) == 1
    _, num_tiles = key_tiles(record, KEYS)
    for i in range(0, num_tiles):
        stage, phase = (used + i) % pipe.stages, ((used + i) // pipe.stages) & 1
        begin_products(ONE_GROUP, SECOND)
        end_products(ONE_GROUP, SECOND)
        mbarrier.wait(pipe.k_filled.index(stage), phase)
        mbarrier.arrive(pipe.k_free.index(stage), count=1)
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    return used + num_tiles


@gluon.jit
def attend_item(
    queries, gather, score, record, kv_head, q, work, turn, pipe, used, shape,
    KEYS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Attend half of a turn's item, from the pipe's tile `used` on; return the number of the next tile."""
    OWN: gl.constexpr = own_dim(shape.head_dim)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    first_tile, num_tiles = key_tiles(record, KEYS)
    begin, end = _visible_keys(queries, gather, score, record, shape, SECOND, ROW)
    last_tile = first_tile + num_tiles - 1
    item = Item(q, begin, end, score.factor, last_tile, pipe, used)
    top = gl.full([HALF], float("-inf"), gl.float32, layout=ROW)
    total = _sum_in_thread(gl.zeros([HALF, KEYS], gl.float32, layout=S_LAYOUT))
    values = gl.zeros([HALF, OWN], gl.float32, layout=O_LAYOUT)
    wait_for_queries(shape)
    if num_tiles > 0:
        weights, top, total = _attend_first(top, total, item, record, shape, KEYS, SECOND, O_LAYOUT)
        weights, values, top, total = _attend_rest(
            weights, values, top, total, item, record, shape, KEYS, SECOND
        )
        stage, phase = (used + num_tiles - 1) % pipe.stages, ((used + num_tiles - 1) // pipe.stages) & 1
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        if shape.windowed or shape.begins:  # noqa: SIM102  (decided when compiled)
            if (num_tiles > 1) & (gl.load(record + 3) % KEYS != 0):
                v = own_half(pipe.v.index(stage), shape, SECOND)
                clear_outside(v, gl.load(record + 3) % KEYS, KEYS, KEYS, 4)
        operand = unpack(weights, q.dtype, O_LAYOUT)
        v = own_half(pipe.v.index(stage), shape, SECOND)
        pending = warpgroup_mma(operand, v, values, is_async=True)
        fetch_next_queries(queries, gather, work, turn, q, shape, SECOND)
        # This branch orders the code as in _step.
        mbarrier.wait(pipe.v_filled.index(stage), phase)
        values, _ = warpgroup_mma_wait(0, deps=(pending, operand))
        mbarrier.arrive(pipe.v_free.index(stage), count=1)
    else:
        fetch_next_queries(queries, gather, work, turn, q, shape, SECOND)
    total = gl.convert_layout(gl.sum(total, 1), ROW)
    store_results(queries, gather, values, top, total, record, kv_head, shape, SECOND)
    return used + num_tiles


@gluon.jit
def _attend_first(
    top, total, item, record, shape,
    KEYS: gl.constexpr, SECOND: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the weights of an item's first tile, and clear the values of it that no row sees."""
    stage, phase = item.used % item.pipe.stages, (item.used // item.pipe.stages) & 1
    ONE_GROUP: gl.constexpr = num_warpgroups(shape.rows, shape.head_dim) == 1
    begin_products(ONE_GROUP, SECOND)
    mbarrier.wait(item.pipe.k_filled.index(stage), phase)
    s = _start_scores(item, stage, KEYS)
    end_products(ONE_GROUP, SECOND)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(item.pipe.k_free.index(stage), count=1)
    # There is no sum yet that the first tile's maximum could shrink.
    weights, top, total, _ = _softmax(s, top, total, 0, item, shape, True, O_LAYOUT)
    end = gl.load(record + 4) - item.last_tile * KEYS
    first = 0
    if shape.windowed or shape.begins:
        first = gl.maximum(0, gl.load(record + 3) - item.last_tile * KEYS)
    if (end < KEYS) | (first > 0):
        mbarrier.wait(item.pipe.v_filled.index(stage), phase)
        clear_outside(own_half(item.pipe.v.index(stage), shape, SECOND), first, end, KEYS, 4)
    return weights, top, total


@gluon.jit
def _visible_keys(
    queries, gather, score, record, shape, SECOND: gl.constexpr, ROW: gl.constexpr
):  # fmt: skip
    """Return the first key that each row sees and the one after the last, [HALF] int32."""
    row = first_row(SECOND, shape.head_dim) + gl.arange(0, HALF, layout=ROW)
    exists = row < gl.load(record + 2) * shape.group
    token, exists = query_rows(gather, gl.load(record + 1) + row // shape.group, exists)
    position = gl.load(queries.positions + token, mask=exists, other=-1)
    begin = gl.zeros_like(position)
    if shape.begins:
        begin += gl.load(record + 3)
    if shape.windowed:
        begin = gl.maximum(begin, position - score.window + 1)
    return begin, gl.minimum(position + 1, gl.load(record + 4))


@gluon.jit
def _attend_rest(
    weights, values, top, total, item, record, shape, KEYS: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Attend an item's tiles after the first; mask only those that some row sees in part."""
    first_tile, num_tiles = key_tiles(record, KEYS)
    full_begin, full_end = gl.load(record + 5), gl.load(record + 6)
    right = gl.minimum(num_tiles, gl.maximum(1, num_tiles - gl.maximum(0, full_end // KEYS - first_tile)))
    for i in range(1, right):
        weights, values, top, total = _step(i, weights, values, top, total, item, shape, KEYS, True, SECOND)
    left = num_tiles
    if shape.windowed or shape.begins:
        num_partly = gl.maximum(0, gl.cdiv(full_begin, KEYS) - first_tile)
        left = gl.maximum(right, num_tiles - num_partly)
    for i in range(right, left):
        weights, values, top, total = _step(i, weights, values, top, total, item, shape, KEYS, False, SECOND)
    if shape.windowed or shape.begins:
        for i in range(left, num_tiles):
            weights, values, top, total = _step(
                i, weights, values, top, total, item, shape, KEYS, True, SECOND
            )
    return weights, values, top, total


@gluon.jit
def _step(
    i, weights, values, top, total, item, shape,
    KEYS: gl.constexpr, MASKED: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Start the products with an item's i-th keys and, by the weights of tile i - 1, with its values."""
    O_LAYOUT: gl.constexpr = values.type.layout
    pipe = item.pipe
    now, before = item.used + i, item.used + i - 1
    k_stage, v_stage = now % pipe.stages, before % pipe.stages
    ONE_GROUP: gl.constexpr = num_warpgroups(shape.rows, shape.head_dim) == 1
    begin_products(ONE_GROUP, SECOND)
    mbarrier.wait(pipe.k_filled.index(k_stage), (now // pipe.stages) & 1)
    s = _start_scores(item, k_stage, KEYS)
    mbarrier.wait(pipe.v_filled.index(v_stage), (before // pipe.stages) & 1)
    operand = unpack(weights, item.q.dtype, O_LAYOUT)
    v = own_half(pipe.v.index(v_stage), shape, SECOND)
    pending = warpgroup_mma(operand, v, values, is_async=True)
    end_products(ONE_GROUP, SECOND)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(pipe.k_free.index(k_stage), count=1)
    weights, top, total, shrink = _softmax(s, top, total, i, item, shape, MASKED, O_LAYOUT)
    # It never waits, but as a branch it keeps ptxas from moving the next wait before the softmax.
    mbarrier.wait(pipe.v_filled.index(v_stage), (before // pipe.stages) & 1)
    # The product reads its weights until here: the dependency makes the compiler keep their registers.
    values, _ = warpgroup_mma_wait(0, deps=(pending, operand))
    mbarrier.arrive(pipe.v_free.index(v_stage), count=1)
    return weights, values * shrink[:, None], top, total


@gluon.jit
def _start_scores(item, stage, KEYS: gl.constexpr):
    """Start the product of an item's queries with a stage's keys; returns what will be [HALF, KEYS]."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zero = gl.zeros([HALF, KEYS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(item.q, item.pipe.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, top, total, i, item, shape, MASKED: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Fold the i-th tile's scores into the maximum and sum: (packed weights, top, total, shrink).

    total is [HALF, 4]: each thread sums what it has of a row, and they add their sums at the end.
    """
    KEYS: gl.constexpr = s.shape[1]
    if MASKED:
        key = (item.last_tile - i) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
        visible = key[None, :] < item.end[:, None]
        if shape.windowed or shape.begins:
            visible = visible & (key[None, :] >= item.begin[:, None])
        s = gl.where(visible, s, float("-inf"))
    highest = gl.max(gl.max(gl.max(_by_thread(s), 3), 1), 1)
    new_top = gl.maximum(top, gl.convert_layout(highest, top.type.layout) * item.factor)
    base = new_top
    if MASKED:
        # A row without a visible key so far keeps top = -inf; base 0 makes its weights exp2(-inf) = 0.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * item.factor - base[:, None])
    shrink = gl.exp2(top - base)
    thread_shrink = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
    total = total * thread_shrink[:, None] + _sum_in_thread(weights)
    packed = pack(weights, item.q.dtype)
    return packed, new_top, total, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))


@gluon.jit
def _by_thread(x):
    """Return x [R, K] in the layout of products as [R, K / 8, 4, 2]: the third dimension is the threads'."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def _sum_in_thread(x):
    """Sum what each of the four threads of a row has of it [R, 4]."""
    return gl.sum(gl.sum(_by_thread(x), 3), 1)


@gluon.jit
def open_turns(SECOND: gl.constexpr):
    """Give the first turn to warpgroup 0; both warpgroups call this before their first turn."""
    if SECOND:
        named_barrier("bar.arrive 8, 256; mov.u32 $0, 0;")


@gluon.jit
def begin_products(ONE_GROUP: gl.constexpr, SECOND: gl.constexpr):
    """Wait until it is this warpgroup's turn; ONE_GROUP: there is no other one."""
    if not ONE_GROUP:
        if SECOND:
            named_barrier("bar.sync 9, 256; mov.u32 $0, 0;")
        else:
            named_barrier("bar.sync 8, 256; mov.u32 $0, 0;")


@gluon.jit
def end_products(ONE_GROUP: gl.constexpr, SECOND: gl.constexpr):
    """Give the turn to the other warpgroup."""
    if not ONE_GROUP:
        if SECOND:
            named_barrier("bar.arrive 8, 256; mov.u32 $0, 0;")
        else:
            named_barrier("bar.arrive 9, 256; mov.u32 $0, 0;")


@gluon.jit
def pack(weights, DTYPE: gl.constexpr):
    """Round weights [R, K] float32 to a 16-bit dtype; returns pairs [R, K / 2] int32."""
    even, odd = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return packed weights as the left operand [R, K] of a product with results in LAYOUT."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even.to(DTYPE, bitcast=True), odd.to(DTYPE, bitcast=True))
    weights = gl.reshape(both, [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, LAYOUT, 2))
