"""The inner loop every Triton attention kernel shares: query rows against tiles of keys in paged blocks.

The G query heads of a kv head are the rows of one product, token after token:

    row      0 .. G-1          G .. 2G-1         ...
    token    token_begin       token_begin + 1
    head     kv_head * G + row % G

Scores are in units of log 2, so that exp2, the hardware's exponential, needs no factor.
"""

import triton
import triton.language as tl

from octavo.attention.triton import kernel_call
from octavo.attention.triton.float8_pairs import (
    add_values,
    join_values,
    key_products,
    product_queries,
    split_values,
)
from octavo.kernels.launch import number_of

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(kernel_call.LOG2_E)


@triton.jit
def tile_rows(token_begin, num_tokens, kv_head, shape):
    """Return (token [R] int64, query head [R], valid [R]) of a tile's rows."""
    row = tl.arange(0, shape.rows)
    token = token_begin + row // shape.group
    head = kv_head * shape.group + row % shape.group
    return token.to(tl.int64), head, row < num_tokens * shape.group


@triton.jit
def empty_state(shape):
    """Return the initial state of a running softmax: (top [R], total [R], values [R, padded_value_dim])."""
    top = tl.full([shape.rows], float("-inf"), tl.float32)
    total = tl.zeros([shape.rows], tl.float32)
    return top, total, tl.zeros([shape.rows, shape.padded_value_dim], tl.float32)


@triton.jit
def load_queries(queries, token, head, valid, shape):
    """Load the tile's queries [R, padded_dim], with 0 for rows and dims that do not exist."""
    d = tl.arange(0, shape.padded_dim)
    pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
    return tl.load(pointers, mask=valid[:, None] & (d < shape.head_dim)[None, :], other=0.0)


@triton.jit
def load_slopes(score, position, table_row, head, valid, shape):
    """Load the ALiBi slope of each row [R] float32; table_row: the sequence. Without bias it is not read."""
    slope = position.to(tl.float32)
    if shape.biased:
        slopes = score.slopes
        if score.slopes_row is not None:
            slopes += table_row.to(tl.int64) * score.slopes_row
        slope = tl.load(slopes + head, mask=valid, other=0.0)
    return slope


@triton.jit
def load_block_ids(table, start, kv_begin, kv_end, shape):
    """Load the block id of the tile at key `start`, or that of each key where a tile spans blocks."""
    if shape.block_size % shape.keys == 0:
        return tl.load(table + start // shape.block_size, mask=start < kv_end, other=0)
    else:
        key = start + tl.arange(0, shape.keys)
        visible = (key >= kv_begin) & (key < kv_end)
        return tl.load(table + key // shape.block_size, mask=visible, other=0)


@triton.jit
def load_tile(
    base, block_stride, token_stride, block_ids, start, kv_begin, kv_end, shape,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys or values [keys, PADDED_DIM], or [keys, PADDED_DIM / 2] pairs.

    If MASKED, keys outside kv_begin : kv_end are 0: uninitialised memory may hold NaN, and 0 * NaN is NaN.
    """
    width: tl.constexpr = PADDED_DIM // 2 if shape.packed else PADDED_DIM
    head_width: tl.constexpr = HEAD_DIM // 2 if shape.packed else HEAD_DIM
    d = tl.arange(0, width)
    at = tl.arange(0, shape.keys)
    if shape.block_size % shape.keys == 0:
        base += block_ids.to(tl.int64) * block_stride
        base += (start % shape.block_size).to(tl.int64) * token_stride
        pointers = base + (at * token_stride)[:, None] + d[None, :]
    else:
        offset = ((start + at) % shape.block_size).to(tl.int64) * token_stride
        pointers = base + (block_ids.to(tl.int64) * block_stride + offset)[:, None] + d[None, :]
    in_head = (d < head_width)[None, :]
    if MASKED:
        visible = (start + at >= kv_begin) & (start + at < kv_end)
        return tl.load(pointers, mask=visible[:, None] & in_head, other=0)
    elif HEAD_DIM != PADDED_DIM:
        return tl.load(pointers, mask=in_head, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def tanh(x):
    """Return tanh(x) without overflow: by a series near 0, where the exponential form would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    small = tl.exp2(-2.0 * LOG2_E * tl.abs(x))
    magnitude = (1.0 - small) / (1.0 + small)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def make_scores(
    product, position, slope, start, kv_begin, kv_end, factor, score, shape, MASKED: tl.constexpr
):
    """Apply cap, bias and mask to q.k [R, keys]. Without cap and bias, the caller applies the factor."""
    key = start + tl.arange(0, shape.keys)
    if shape.capped:
        # The factor carries log2(e) past the cap: cap(s) * log2(e).
        cap = score.softcap * LOG2_E
        product = cap * tanh(product * (factor / cap))
    elif shape.biased:
        product = product * factor
    if shape.biased:
        distance = position[:, None] - key[None, :]
        if score.shift is not None:
            distance = tl.abs(distance - score.shift)
        distance = distance.to(tl.float32)
        product = product - (slope * LOG2_E)[:, None] * distance
    if MASKED:
        visible = (key[None, :] <= position[:, None]) & (key < kv_end)[None, :]
        if shape.windowed:
            visible = visible & (key[None, :] > position[:, None] - score.window)
        if shape.begins:
            visible = visible & (key >= kv_begin)[None, :]
        product = tl.where(visible, product, float("-inf"))
    return product


@triton.jit
def load_factors(score, table_row, kv_head, shape):
    """Return the factor of q.k, what is left of it for make_scores' result, and the scale of values.

    The second is 1.0 where make_scores applies a cap or a bias, and with them the factor; else the factor.
    """
    factor = score.factor
    v_scale = 1.0
    if shape.scaled:
        scale_at = kv_head
        if score.scales_row is not None:
            scale_at += table_row * score.scales_row
        factor *= tl.load(score.k_scale + scale_at)
        v_scale = tl.load(score.v_scale + scale_at)
    left = factor
    if shape.capped or shape.biased:
        left = 1.0
    return factor, left, v_scale


@triton.jit
def fold_scores(
    top, total, product, position, slope, start, kv_begin, kv_end,
    score_factor, factor, score, shape, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold q.k [R, keys] of a tile, which begins at key `start`, into a running softmax.

    score_factor, factor: see load_factors.

    Returns:
        (weights [R, keys] of the tile's values, shrink [R] of the values so far, top, total).
    """
    s = make_scores(product, position, slope, start, kv_begin, kv_end, score_factor, score, shape, MASKED)
    new_top = tl.maximum(top, tl.max(s, 1) * factor)
    base = new_top
    if MASKED:
        # A row without a visible key keeps -inf; base 0 makes its weights exp2(-inf) = 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def attend_tiles(
    top, total, values, q, position, slope, cache, table_row, kv_head,
    tile_begin, tile_end, kv_begin, kv_end, score, shape, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key tiles tile_begin : tile_end into a running softmax.

    Each iteration loads the block id of the next tile: loading an id and its block in the same iteration
    would be a chain of loads that the compiler cannot overlap with the products.

    Args:
        top: [R] float32 largest score so far, -inf at first.
        total: [R] float32 sum of exponentials below it.
        values: [R, padded_value_dim] float32 weighted values.
        q: [R, padded_dim] queries.
        position: [R] int32 shifted query positions, -1 in rows that do not exist.
        slope: [R] float32 ALiBi slopes.
        table_row, kv_head: which sequence's blocks are read, and which head of them.
        kv_begin, kv_end: keys outside are never read if MASKED.

    Returns:
        (top, total, values) updated.

    Source: Dao et al., "FlashAttention", 2022; Kwon et al., "PagedAttention", 2023.
    """
    table = cache.table + table_row.to(tl.int64) * number_of(cache.table_row)
    k_base = cache.k + kv_head.to(tl.int64) * cache.k_head
    v_base = cache.v + kv_head.to(tl.int64) * cache.v_head
    q, q_odd = product_queries(q, shape)
    score_factor, factor, v_scale = load_factors(score, table_row, kv_head, shape)
    if shape.scaled:
        # Inside the loop, values are not multiplied by their scale.
        values /= v_scale
    values, values_odd = split_values(values, shape)
    block_ids = load_block_ids(table, tile_begin * shape.keys, kv_begin, kv_end, shape)
    for tile in range(tile_begin, tile_end):
        start = tile * shape.keys
        next_ids = load_block_ids(table, start + shape.keys, kv_begin, kv_end, shape)
        k = load_tile(
            k_base, cache.k_block, cache.k_token, block_ids, start, kv_begin, kv_end, shape,
            shape.head_dim, shape.padded_dim, MASKED,
        )  # fmt: skip
        product = key_products(q, q_odd, k, shape)
        weights, shrink, top, total = fold_scores(
            top, total, product, position, slope, start, kv_begin, kv_end,
            score_factor, factor, score, shape, MASKED,
        )  # fmt: skip
        v = load_tile(
            v_base, cache.v_block, cache.v_token, block_ids, start, kv_begin, kv_end, shape,
            shape.value_dim, shape.padded_value_dim, MASKED,
        )  # fmt: skip
        values *= shrink[:, None]
        if shape.packed:
            values_odd *= shrink[:, None]
        values, values_odd = add_values(values, values_odd, weights, v, shape)
        block_ids = next_ids
    values = join_values(values, values_odd, shape)
    if shape.scaled:
        values *= v_scale
    return top, total, values


@triton.jit
def fold_partials(top, total, values, out, lse):
    """Fold finished partial results out [P, R, padded_dim], lse [P, R] in units of log 2, into the state.

    Specification: octavo.attention.merge, several partial results at a time.
    """
    new_top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(lse - base[None, :])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 0)
    values = values * shrink[:, None] + tl.sum(weights[:, :, None] * out, 0)
    return new_top, total, values


@triton.jit
def normalise(top, total, values):
    """Finish a running softmax: (out [R, D], lse [R] in units of log 2); 0 and -inf if nothing was seen."""
    safe = tl.where(total == 0, 1.0, total)
    return values / safe[:, None], tl.where(total == 0, float("-inf"), top + tl.log2(safe))


@triton.jit
def store_results(queries, token, head, valid, out, lse, shape):
    """Write a tile's final rows: out [R, padded_value_dim], lse [R] in units of log 2."""
    d = tl.arange(0, shape.padded_value_dim)
    row = token * (shape.group * shape.kv_heads) + head
    pointers = queries.out + (row * shape.value_dim)[:, None] + d[None, :]
    tl.store(
        pointers, out.to(queries.out.dtype.element_ty), mask=valid[:, None] & (d < shape.value_dim)[None, :]
    )
    tl.store(queries.lse + row, lse * LN_2, mask=valid)


@triton.jit
def clear_tokens(queries, token_begin, num_tokens, first, step, shape):
    """Clear every `step`-th (token, head) row of tokens without keys, from row `first` on: 0 and -inf."""
    width: tl.constexpr = shape.group * shape.kv_heads
    d = tl.arange(0, shape.padded_value_dim)
    begin = token_begin.to(tl.int64) * width
    for index in range(first, num_tokens * width, step):
        zero = tl.zeros([shape.padded_value_dim], dtype=queries.out.dtype.element_ty)
        tl.store(queries.out + (begin + index) * shape.value_dim + d, zero, mask=d < shape.value_dim)
        tl.store(queries.lse + begin + index, float("-inf"))
