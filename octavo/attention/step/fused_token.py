"""A program's share of fused_decode.py: a piece of a sequence's keys, and the heads of the sequence's token.

Heads are pairs (first, second) of numbers that rotate together, each [rows, D / 2]; in memory and in a cache
they are neighbours. The key and the value are in each row: so threads have them where they have the queries,
and need no other's help. Not in float8: of two numbers that a thread rounds to float8 and takes apart again,
ptxas 12.8 takes one from a wrong register. In one row a thread has a single pair.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.attention.step.rotate_store import (
    inverse_lengths,
    join_pairs,
    load_pairs,
    norm_pairs,
    rotate_pairs,
)
from octavo.attention.triton.step_map import num_key_tiles
from octavo.attention.triton.store import round_to, scale_down


class Rotation(NamedTuple):
    """Pointers to cosines and sines [T, D / 2], strides, norms' weights [H + KH, D] and eps.

    The strides are a row's, and from there to the queries' own row; value_eps: that of values' norm, or None.
    """

    cos: Any
    sin: Any
    row: Any
    queries: Any
    norm: Any
    eps: Any
    value_eps: Any = None


@triton.jit
def load_weights(rotation, token, kv_head, NORM: tl.constexpr, shape):
    """Load a token's angles and the norms' weights of a kv head's queries and of its key, as pairs."""
    first = token.to(tl.int64) * rotation.row
    q_angles = _load_angles(rotation, first + rotation.queries, shape.rows, shape)
    k_angles = _load_angles(rotation, first, _key_rows(shape.packed, shape.rows), shape)
    q_norm, k_norm = q_angles, k_angles
    if NORM:
        q_norm = _load_queries(rotation.norm, kv_head, shape)
        k_norm = _load_head(rotation.norm, shape.group * shape.kv_heads + kv_head, shape)
    return q_angles, k_angles, q_norm, k_norm


@triton.constexpr_function
def _key_rows(packed, rows):
    return 1 if packed else rows


@triton.jit
def _load_angles(rotation, first, ROWS: tl.constexpr, shape):
    """Load cosines and sines, each [ROWS, D / 2], all rows the same."""
    pair = tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, shape.padded_dim // 2)[None, :]
    inside = pair < shape.head_dim // 2
    cos = tl.load(rotation.cos + first + pair, mask=inside, other=1.0)
    return cos, tl.load(rotation.sin + first + pair, mask=inside, other=0.0)


@triton.jit
def rotate(
    qkv, cache, score, weights, rotation, kv_head, NORM: tl.constexpr, KEYS_ARE_VALUES: tl.constexpr, shape
):
    """Norm and rotate a kv head's queries and its key.

    Args:
        qkv: pointer to the token's heads: q, k, v; without v if KEYS_ARE_VALUES.
        weights: of load_weights.
        rotation: whose eps are read.

    Returns:
        (queries, rounded to the dtype of qkv; key and value, rounded as the cache stores them), as pairs.
    """
    q_angles, k_angles, q_norm, k_norm = weights
    num_heads = shape.group * shape.kv_heads
    q = _load_queries(qkv, kv_head, shape)
    k = _load_head(qkv, num_heads + kv_head, shape)
    if KEYS_ARE_VALUES:
        v = _load_halves(qkv, num_heads + kv_head, shape)
    else:
        v = _load_head(qkv, num_heads + shape.kv_heads + kv_head, shape)
    if rotation.value_eps is not None:
        scale = inverse_lengths(v[0], v[1], rotation.value_eps, shape.head_dim)
        v = (v[0] * scale, v[1] * scale)
    if NORM:
        q = norm_pairs(q[0], q[1], q_norm[0], q_norm[1], rotation.eps, shape.head_dim)
        k = norm_pairs(k[0], k[1], k_norm[0], k_norm[1], rotation.eps, shape.head_dim)
    q = rotate_pairs(q[0], q[1], q_angles[0], q_angles[1])
    q = (q[0].to(qkv.dtype.element_ty), q[1].to(qkv.dtype.element_ty))
    k = rotate_pairs(k[0], k[1], k_angles[0], k_angles[1])
    k = _as_stored(k, score.k_scale, kv_head, cache.k.dtype.element_ty, shape)
    return q, k, _as_stored(v, score.v_scale, kv_head, cache.v.dtype.element_ty, shape)


@triton.jit
def _load_queries(heads, kv_head, shape):
    """Load the heads of a kv head's queries as pairs, each [rows, D / 2] float32."""
    row = tl.arange(0, shape.rows)[:, None]
    at = heads + (kv_head * shape.group + row) * shape.head_dim
    return load_pairs(at, row < shape.group, shape.head_dim, shape.padded_dim // 2)


@triton.jit
def _load_head(heads, head, shape):
    """Load a head as pairs, each [rows, D / 2] float32, all rows the same, or a single one."""
    row = tl.arange(0, _key_rows(shape.packed, shape.rows))[:, None]
    at = heads + (head + row * 0) * shape.head_dim
    return load_pairs(at, row >= 0, shape.head_dim, shape.padded_dim // 2)


@triton.jit
def _load_halves(heads, head, shape):
    """Load a head as _load_head does, but numbers 0, 2, 4, ... of it before numbers 1, 3, 5, ..."""
    HALF: tl.constexpr = shape.head_dim // 2
    row = tl.arange(0, _key_rows(shape.packed, shape.rows))[:, None]
    dim = tl.arange(0, shape.padded_dim)[None, :] + row * 0
    at = heads + head * shape.head_dim + dim % HALF * 2 + dim // HALF
    both = tl.load(at, mask=dim < shape.head_dim, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(both, [both.shape[0], shape.padded_dim // 2, 2]))
    return first, second


@triton.jit
def _as_stored(pairs, scale, kv_head, DTYPE: tl.constexpr, shape):
    """Return a head's pairs, divided by its scale and rounded as a cache of DTYPE does."""
    KIND: tl.constexpr = tl.float8e4nv if shape.packed else DTYPE
    head = kv_head + tl.zeros([1, 1], tl.int32)
    first = scale_down(pairs[0], scale, head, head >= 0)
    second = scale_down(pairs[1], scale, head, head >= 0)
    return round_to(first, KIND), round_to(second, KIND)


@triton.jit
def store_row(base, block_stride, token_stride, slot, block_size, pairs, shape):
    """Store a head's pairs in a slot; base: the head's rows."""
    at = base + slot // block_size * block_stride + slot % block_size * token_stride
    is_first = tl.arange(0, _key_rows(shape.packed, shape.rows))[:, None] == 0
    if shape.packed:
        low, high = (pairs[0].to(tl.uint8, bitcast=True), pairs[1].to(tl.uint8, bitcast=True))
        row = (low.to(tl.uint16) | (high.to(tl.uint16) << 8)).to(tl.int16, bitcast=True)
        d = tl.arange(0, shape.padded_dim // 2)[None, :]
        tl.store(at + tl.broadcast_to(d, row.shape), row, mask=is_first & (d < shape.head_dim // 2))
    else:
        d = tl.arange(0, shape.padded_dim)[None, :]
        row = join_pairs(pairs[0], pairs[1])
        tl.store(at + tl.broadcast_to(d, row.shape), row, mask=is_first & (d < shape.head_dim))


@triton.jit
def find_piece(number, step, window, num_sequences, SEQUENCES: tl.constexpr, SPLITS: tl.constexpr, shape):
    """Cut the key tiles of a step's sequences into at most SPLITS pieces, and return one.

    Args:
        number: of the piece, below SPLITS.
        step: positions, lengths and slots of the sequences, one token each.
        window: see options.ScoreOptions; read if the shape has one.
        num_sequences: at most SEQUENCES and SPLITS.

    Returns:
        (sequence, position, kv_begin, kv_end, tiles begin : end, first piece of the sequence, its number of
        pieces, whether sequence `number` sees no keys). If there is no such piece, the number of pieces is 0.
    """
    index = tl.arange(0, SEQUENCES)
    exists = index < num_sequences
    position = tl.load(step.positions + index, mask=exists, other=-1)
    kv_end = tl.minimum(tl.load(step.seq_lens + index, mask=exists, other=0), position + 1).to(tl.int32)
    kv_begin = kv_end * 0
    if shape.windowed:
        kv_begin = tl.minimum(kv_end, tl.maximum(0, position - window + 1))
    tiles = num_key_tiles(kv_begin, kv_end, shape.keys)
    each = tl.maximum(1, tl.cdiv(tl.sum(tiles), SPLITS))
    counts = tl.cdiv(tiles, each)
    while tl.sum(counts) > SPLITS:
        each += tl.cdiv(each, 16)
        counts = tl.cdiv(tiles, each)
    sees_nothing = tl.sum((exists & (tiles == 0) & (index == number)).to(tl.int32)) > 0
    firsts = tl.sum(tl.where(index[None, :] < index[:, None], counts[None, :], 0), 1)
    is_own = (firsts <= number) & (number < firsts + counts)
    sequence, first, count = _pick(index, is_own), _pick(firsts, is_own), _pick(counts, is_own)
    begin, num_tiles = _pick(kv_begin // shape.keys, is_own), _pick(tiles, is_own)
    tile = begin + (number - first) * each
    end = tl.minimum(tile + each, begin + num_tiles)
    kv_begin, kv_end = _pick(kv_begin, is_own), _pick(kv_end, is_own)
    return sequence, _pick(position, is_own), kv_begin, kv_end, tile, end, first, count, sees_nothing


@triton.jit
def _pick(values, is_own):
    return tl.sum(tl.where(is_own, values, 0))
