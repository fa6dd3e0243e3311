"""One launch that rotates queries and new keys, and stores new keys and values to their slots of a cache.

program (t, part)   part < query parts: some heads of query t, rotated into a new tensor
                    else:               some kv heads of new token t, into the cache
                    part 0:             the length of sequence t afterwards, too
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.triton.store import round_to
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, number_of, varying
from octavo.ops.call import NewKeys, Queries, Rotary, contiguous

# Numbers that a program has in registers at a time.
_TILE = 2048


class Rows(NamedTuple):
    """Pointer and strides (in elements) of ragged [T, heads, D], and where sequences begin.

    num_tokens: T, see kernels.launch.varying.
    length: tokens of each sequence, if cu_seqlens [S + 1] is None; likewise.
    """

    pointer: Any
    token: Any
    head: Any
    cu_seqlens: Any
    num_tokens: Any
    length: Any


class Blocks(NamedTuple):
    """Pointer and strides (in elements) of a [N, B, KH, D] cache, and its scales [S, KH]."""

    pointer: Any
    block: Any
    token: Any
    head: Any
    dim: Any
    scale: Any


class Places(NamedTuple):
    """Where new keys go: a block table, the tokens before them, and limits that make a bad id harmless.

    table_row, num_blocks, capacity: see kernels.launch.varying.
    """

    table: Any
    table_row: Any
    cached_lens: Any
    block_size: Any
    num_blocks: Any
    capacity: Any


class Angles(NamedTuple):
    """cos and sin [positions, half], and each sequence's first position.

    num_positions: see kernels.launch.varying.
    """

    cos: Any
    cos_row: Any
    sin: Any
    sin_row: Any
    offsets: Any
    num_positions: Any


def append(
    queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """See octavo.ops.append. Nothing waits for the device; a slot or position out of range is skipped."""
    q, k, v = contiguous(queries.q), contiguous(new.k), contiguous(new.v)
    (num_tokens, num_heads, head_dim), value_dim = q.shape, v_cache.shape[3]
    num_kv_heads, num_sequences = k_cache.shape[2], new.cached_lens.shape[0]
    rotated = queries.q if rotary is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads = min(power_of_two(num_heads), max(1, _TILE // power_of_two(head_dim)))
    padded_dim = power_of_two(max(head_dim, value_dim))
    kv_heads = min(power_of_two(num_kv_heads), max(1, _TILE // padded_dim))
    num_query_parts = 0 if rotary is None else -(-num_heads // heads)
    seq_lens = torch.empty(num_sequences, dtype=torch.int32, device=q.device)
    if num_sequences == 0:
        return rotated, seq_lens
    num_programs = max(num_sequences, k.shape[0], 0 if rotary is None else num_tokens)
    block_size = k_cache.shape[1]
    table = new.block_table
    num_new = varying(k.shape[0]), varying(new.length)
    launch(
        _append_kernel,
        (num_programs, num_query_parts + -(-num_kv_heads // kv_heads)),
        Rows(q, *q.stride()[:2], queries.cu_seqlens, varying(num_tokens), varying(queries.length)),
        rotated,
        Rows(k, *k.stride()[:2], new.cu_seqlens, *num_new),
        Rows(v, *v.stride()[:2], new.cu_seqlens, *num_new),
        Blocks(k_cache, *k_cache.stride(), new.k_scale),
        Blocks(v_cache, *v_cache.stride(), new.v_scale),
        Places(
            table,
            varying(table.stride(0)),
            new.cached_lens,
            block_size,
            num_blocks=varying(k_cache.shape[0]),
            capacity=varying(table.shape[1] * block_size),
        ),
        _angles(rotary),
        seq_lens,
        num_sequences,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HALF=0 if rotary is None else rotary.cos.shape[1],
        INTERLEAVED=rotary is not None and rotary.interleaved,
        ADVANCE=rotary is not None and rotary.queries_advance,
        QUERY_PARTS=num_query_parts,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PADDED_DIM=power_of_two(head_dim),
        PADDED_KV_DIM=padded_dim,
    )
    return rotated, seq_lens


def _angles(rotary: Rotary | None) -> Angles:
    if rotary is None:
        return Angles(None, 0, None, 0, None, 0)
    cos, sin = contiguous(rotary.cos), contiguous(rotary.sin)
    return Angles(cos, cos.stride(0), sin, sin.stride(0), rotary.offsets, varying(cos.shape[0]))


@triton.jit(do_not_specialize=["num_sequences"])
def _append_kernel(
    q, rotated, k, v, k_cache, v_cache, places, angles, seq_lens, num_sequences,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr,
    QUERY_PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_KV_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if (part == 0) & (token < num_sequences):
        _store_length(seq_lens, k, places, token)
    if QUERY_PARTS > 0:  # noqa: SIM102 (known when compiled: without rotation there is nothing to compile)
        if (part < QUERY_PARTS) & (token < number_of(q.num_tokens)):
            head = part * HEADS + tl.arange(0, HEADS)
            _store_rotated(
                rotated, q, token, head, angles, num_sequences,
                NUM_HEADS, HEAD_DIM, HALF, INTERLEAVED, ADVANCE, PADDED_DIM,
            )  # fmt: skip
    if (part >= QUERY_PARTS) & (token < number_of(k.num_tokens)):
        row, index = _find_row(k, token, num_sequences)
        num_cached = tl.load(places.cached_lens + row)
        position = num_cached + index
        fits = (num_cached >= 0) & (position < number_of(places.capacity))
        if k.cu_seqlens is not None:
            fits = fits & (token < tl.load(k.cu_seqlens + num_sequences))
        if fits:
            column = position // places.block_size
            table_at = places.table + row.to(tl.int64) * number_of(places.table_row)
            block = tl.load(table_at + column).to(tl.int64)
            offset = (position % places.block_size).to(tl.int64)
            if (block >= 0) & (block < number_of(places.num_blocks)):
                head = (part - QUERY_PARTS) * KV_HEADS + tl.arange(0, KV_HEADS)
                if HALF > 0:
                    at = tl.load(angles.offsets + row) + index
                    key = _rotate(
                        k, token, head, NUM_KV_HEADS, at, angles, HEAD_DIM, HALF, INTERLEAVED, PADDED_KV_DIM
                    )
                else:
                    key = _load(k, token, head, NUM_KV_HEADS, HEAD_DIM, PADDED_KV_DIM)
                value = _load(v, token, head, NUM_KV_HEADS, VALUE_DIM, PADDED_KV_DIM)
                _store(k_cache, key, row, block, offset, head, NUM_KV_HEADS, HEAD_DIM, PADDED_KV_DIM)
                _store(v_cache, value, row, block, offset, head, NUM_KV_HEADS, VALUE_DIM, PADDED_KV_DIM)


@triton.jit
def _store_rotated(
    rotated, q, token, head, angles, num_sequences, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Store heads of a query, rotated."""
    row, index = _find_row(q, token, num_sequences)
    position = tl.load(angles.offsets + row)
    if ADVANCE:
        position += index
    x = _rotate(q, token, head, NUM_HEADS, position, angles, HEAD_DIM, HALF, INTERLEAVED, PADDED_DIM)
    d = tl.arange(0, PADDED_DIM)
    at = rotated + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, x, (head < NUM_HEADS)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _store_length(seq_lens, k, places, row):
    """Store the length of a sequence with its new keys; a negative one stays empty."""
    num_cached = tl.load(places.cached_lens + row)
    if k.cu_seqlens is None:
        num_new = number_of(k.length)
    else:
        num_new = tl.load(k.cu_seqlens + row + 1) - tl.load(k.cu_seqlens + row)
    tl.store(seq_lens + row, tl.where(num_cached < 0, 0, num_cached + num_new))


@triton.jit
def _find_row(rows, token, num_sequences):
    """Return (sequence, index in it) of a token; one after the last sequence counts as its own."""
    if rows.cu_seqlens is None:
        row = token.to(tl.int32) // number_of(rows.length)
        index = token.to(tl.int32) % number_of(rows.length)
    else:
        row = 0
        for begin in range(0, num_sequences, 1024):
            s = begin + tl.arange(0, 1024)
            end = tl.load(rows.cu_seqlens + 1 + s, s < num_sequences, other=2147483647)
            row += tl.sum((end <= token).to(tl.int32), axis=0)
        row = tl.minimum(row, num_sequences - 1)
        index = token.to(tl.int32) - tl.load(rows.cu_seqlens + row)
    return row, index


@triton.jit
def _load(rows, token, head, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    at = rows.pointer + token * rows.token + (head.to(tl.int64) * rows.head)[:, None] + d[None, :]
    return tl.load(at, (head < NUM_HEADS)[:, None] & (d < DIM)[None, :])


@triton.jit
def _rotate(
    rows, token, head, NUM_HEADS: tl.constexpr, position, angles,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return heads of a token [heads, PADDED], the first 2 HALF dimensions rotated, in their dtype."""
    d = tl.arange(0, PADDED)
    x = _load(rows, token, head, NUM_HEADS, DIM, PADDED)
    if INTERLEAVED:
        other, angle, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        is_first = d < HALF
        other, angle = tl.where(is_first, d + HALF, d - HALF), tl.where(is_first, d, d - HALF)
    turns = d < 2 * HALF
    has_angle = turns & (position >= 0) & (position < number_of(angles.num_positions))
    row = tl.maximum(position, 0).to(tl.int64)
    cos = tl.load(angles.cos + row * angles.cos_row + angle, has_angle, other=0.0).to(tl.float32)
    sin = tl.load(angles.sin + row * angles.sin_row + angle, has_angle, other=0.0).to(tl.float32)
    at = rows.pointer + token * rows.token + (head.to(tl.int64) * rows.head)[:, None] + other[None, :]
    y = tl.load(at, (head < NUM_HEADS)[:, None] & turns[None, :]).to(tl.float32)
    turned = x.to(tl.float32) * cos[None, :] + y * tl.where(is_first, -sin, sin)[None, :]
    return tl.where(turns[None, :], turned, x.to(tl.float32)).to(x.dtype)


@triton.jit
def _store(
    cache, x, row, block, offset, head, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Store heads of a token [heads, PADDED] to a slot, divided by the scales of a float8 cache."""
    d = tl.arange(0, PADDED)
    valid = (head < NUM_HEADS)[:, None]
    if cache.scale is not None:
        scale = tl.load(cache.scale + row.to(tl.int64) * NUM_HEADS + head[:, None], valid, other=1.0)
        x = x.to(tl.float32) / scale
    at = cache.pointer + block * cache.block + offset * cache.token
    at = at + (head.to(tl.int64) * cache.head)[:, None] + (d.to(tl.int64) * cache.dim)[None, :]
    tl.store(at, round_to(x, cache.pointer.dtype.element_ty), valid & (d < DIM)[None, :])
