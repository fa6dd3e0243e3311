"""Decoding of at most 16 sequences in one kernel: rotate, store and attend.

A step of few tokens is a chain of kernels of a few microseconds, each of which waits for the one before. So
one kernel does all between the fused projection and the output projection, and fetches keys before it waits:

    program (piece of a sequence, kv head)

      while qkv is computed    fetch its first tile of keys and values, the rotation, the norms' weights
      then                     q heads of the kv head, and the new key and value: norm -> rotate
                               a sequence's last piece stores the new key and value
                               attend its tiles; in the first, the new key is a score of its own
                               the last of a sequence's programs to finish merges their results, in order

What it reads before it waits must be older than the kernels that let a next one start early: the cache of
earlier steps, and the step's metadata and rotations.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions
from octavo.attention.step.fused_token import Rotation, find_piece, load_weights, rotate, store_row
from octavo.attention.step.rotate_store import join_pairs
from octavo.attention.tilings.portable import TileShape, fused_shape, padded_head_dim
from octavo.attention.triton import float8_pairs
from octavo.attention.triton.kernel_call import empty_results, make_call
from octavo.attention.triton.tiles import (
    LOG2_E,
    attend_tiles,
    empty_state,
    fold_scores,
    load_block_ids,
    load_factors,
    load_tile,
    normalise,
    store_results,
)
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch, number_of, overlaps, start_next, wait_for_previous

# Numbers that a program merges at a time, each with its lse.
_MERGED_VALUES = tl.constexpr(8192)
_MOST_SEQUENCES = 16
# Numbers of a program's results.
_MOST_RESULTS = 8192


class Step(NamedTuple):
    """Pointers to tokens' positions, their sequences' lengths, and their slots, one number for each."""

    positions: Any
    seq_lens: Any
    slot_mapping: Any


class Pieces(NamedTuple):
    """Pointers to pieces' results, and to how many of a sequence's kv head have arrived; see FusedWork."""

    arrivals: Any
    out: Any
    lse: Any


@dataclass(frozen=True, slots=True)
class FusedWork:
    """Memory for layers with the same heads that run one after another.

    Attributes:
        tile: how the kernel is tiled.
        num_splits: programs of a kv head that attend.
        num_programs: at least one on each SM. Those that attend nothing keep the next kernel's programs from
            going there two by two.
        arrivals: [num_splits, KH] int32, finished pieces of a sequence's kv head; 0 between calls.
        partial_out: [KH num_splits, rows, padded dim] float32.
        partial_lse: the same shape, float32: a row's lse in units of log 2, beside each of its numbers. So a
            thread that merges numbers needs no other's help.
    """

    tile: TileShape
    num_splits: int
    num_programs: int
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @classmethod
    def allocate(cls, cache: LayerCache, num_heads: int) -> "FusedWork":
        """Allocate for layers with such a cache; num_heads: H."""
        (_, _, num_kv_heads, head_dim), device = cache.k.shape, cache.k.device
        tile = fused_shape(num_heads // num_kv_heads, padded_head_dim(head_dim), cache.k.dtype, device)
        num_splits = _num_splits(num_kv_heads, device)
        num_programs = max(num_multiprocessors(device), num_kv_heads * num_splits)
        arrivals = torch.zeros(num_splits, num_kv_heads, dtype=torch.int32, device=device)
        results = (2, num_kv_heads * num_splits, tile.rows, padded_head_dim(head_dim))
        out, lse = torch.empty(results, dtype=torch.float32, device=device)
        return cls(tile, num_splits, num_programs, arrivals, out, lse)


def unsupported_reason(cache: LayerCache, num_sequences: int, num_heads: int) -> str | None:
    """Return why one kernel cannot attend a step's tokens in a layer, or None if it can; num_heads: H."""
    num_kv_heads, head_dim = cache.k.shape[2:]
    most = most_sequences(num_kv_heads, cache.k.device)
    if num_sequences > most:
        return f"it is for at most {most} sequences, not {num_sequences}"
    if num_heads // num_kv_heads * head_dim > _MOST_RESULTS:
        return f"{num_heads // num_kv_heads} query heads of {head_dim} on a kv head do not fit in registers"
    return None


def most_sequences(num_kv_heads: int, device: torch.device) -> int:
    """Return up to how many sequences one kernel attends.

    No program has keys of two sequences. So that a long one beside short ones gets most of a kv head's
    programs, there are four times as many as sequences.
    """
    return max(1, min(_MOST_SEQUENCES, _num_splits(num_kv_heads, device) // 4))


def _num_splits(num_kv_heads: int, device: torch.device) -> int:
    """Return how many programs of a kv head attend."""
    return max(1, num_multiprocessors(device) // num_kv_heads)


def attend_fused(
    qkv: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    cos: Tensor,
    sin: Tensor,
    options: ScoreOptions,
    work: FusedWork,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    value_norm: float | None = None,
    keys_are_values: bool = False,
    query_angles: int = 0,
) -> Tensor:
    """Return what rotate_and_store and then attention return, [S, H, D], of the last tokens of sequences.

    Args:
        qkv: [S, (H + 2 KH) * D], or without v heads, see rotate_and_store; it is left as it is.
        cache: of the layer; tokens' keys and values are written to their slots.
        metadata: of at most most_sequences with one query token each; of several, keys_are_old.
        cos, sin: [S, D / 2 or more] float32, last dimension contiguous, with the same strides.
        options: of the scores, without slopes.
        work: for such layers; see there.
        norm_weight, eps, value_norm, keys_are_values, query_angles: see rotate_and_store.
    """
    _, block_size, num_kv_heads, head_dim = cache.k.shape
    num_sequences, num_others = qkv.shape[0], num_kv_heads * (1 if keys_are_values else 2)
    num_heads = qkv.shape[1] // head_dim - num_others
    tile, overlap = work.tile, overlaps(qkv)
    q = qkv.as_strided((num_sequences, num_heads, head_dim), (qkv.stride(0), head_dim, 1))
    results, norm = empty_results(q), cos if norm_weight is None else norm_weight
    call = make_call(q, cache, metadata.positions, metadata.block_table, options, results)
    launch(
        _attend_fused_kernel,
        (work.num_programs,),
        queries=call.queries, cache=call.cache, score=call.score,
        step=Step(metadata.positions, metadata.seq_lens, metadata.slot_mapping),
        rotation=Rotation(cos, sin, cos.stride(0), query_angles, norm, eps, value_norm),
        pieces=Pieces(work.arrivals, work.partial_out, work.partial_lse), sinks=options.sinks,
        block_size=block_size, num_sequences=num_sequences, shape=call.shape(tile), SPLITS=work.num_splits,
        SEQUENCES=1 if num_sequences == 1 else _MOST_SEQUENCES,
        MERGED_ROWS=power_of_two(num_heads // num_kv_heads), NORM=norm_weight is not None,
        KEYS_ARE_VALUES=keys_are_values, OVERLAP=overlap,
        launch_pdl=overlap, num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip
    return results[0]


@triton.jit(do_not_specialize=["block_size", "num_sequences"])
def _attend_fused_kernel(
    queries, cache, score, step, rotation, pieces, sinks, block_size, num_sequences, shape,
    SPLITS: tl.constexpr, SEQUENCES: tl.constexpr, MERGED_ROWS: tl.constexpr, NORM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (KH * SPLITS or more,). At most MERGED_ROWS of a tile's rows exist."""
    start_next(OVERLAP)
    kv_head, piece = tl.program_id(0) % shape.kv_heads, tl.program_id(0) // shape.kv_heads
    sequence, position, kv_begin, kv_end, begin, end, first_piece, num_pieces, sees_nothing = find_piece(
        piece, step, score.window, num_sequences, SEQUENCES, SPLITS, shape
    )
    slot = tl.load(step.slot_mapping + sequence).to(tl.int64)
    start = begin * shape.keys
    is_new = (start + tl.arange(0, shape.keys) == position) & (slot >= 0) & (position < kv_end)
    table = cache.table + sequence.to(tl.int64) * number_of(cache.table_row)
    k_base = cache.k + kv_head.to(tl.int64) * cache.k_head
    v_base = cache.v + kv_head.to(tl.int64) * cache.v_head
    k, v = _load_first(cache, table, k_base, v_base, start, is_new, kv_begin, kv_end, shape)
    weights = load_weights(rotation, sequence, kv_head, NORM, shape)
    wait_for_previous(OVERLAP)

    if sees_nothing:
        top, total, values = empty_state(shape)
        _finish(queries, piece, kv_head, top, total, values, sinks, shape)
    if num_pieces > 0:
        qkv = queries.q + sequence.to(tl.int64) * queries.token
        q, new_k, new_v = rotate(qkv, cache, score, weights, rotation, kv_head, NORM, KEYS_ARE_VALUES, shape)
        if (piece == first_piece + num_pieces - 1) & (slot >= 0):
            store_row(k_base, cache.k_block, cache.k_token, slot, block_size, new_k, shape)
            store_row(v_base, cache.v_block, cache.v_token, slot, block_size, new_v, shape)
        # Other threads may read the row, in a tile after the first.
        tl.debug_barrier()
        positions = position + tl.zeros([shape.rows], tl.int32)
        top, total, values = _attend_first(
            q, k, v, is_new, new_k, new_v, sequence, kv_head, positions, start, kv_begin, kv_end, score, shape
        )
        if begin + 1 < end:
            # `total` stands in for slopes, which are not read.
            top, total, values = attend_tiles(
                top, total, values, join_pairs(q[0], q[1]), positions, total, cache, sequence, kv_head,
                begin + 1, end, kv_begin, kv_end, score, shape, True,
            )  # fmt: skip
        if num_pieces == 1:
            _finish(queries, sequence, kv_head, top, total, values, sinks, shape)
        else:
            _store_split(pieces, kv_head * SPLITS + piece, top, total, values, shape)
            tl.debug_barrier()
            arrivals = pieces.arrivals + sequence * shape.kv_heads + kv_head
            arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
            if arrived == num_pieces - 1:
                # The counter is reset for the next layer, whose kernel waits until this one has ended.
                tl.store(arrivals, 0)
                first_piece += kv_head * SPLITS
                merged = _merge_splits(pieces, first_piece, num_pieces, shape, SPLITS, MERGED_ROWS)
                _finish(queries, sequence, kv_head, merged[0], merged[1], merged[2], sinks, shape)


@triton.jit
def _load_first(cache, table, k_base, v_base, start, is_new, kv_begin, kv_end, shape):
    """Load the tiles of keys and of values that begin at key `start`; the new key's value is 0."""
    ids = load_block_ids(table, start, kv_begin, kv_end, shape)
    k = load_tile(
        k_base, cache.k_block, cache.k_token, ids, start, kv_begin, kv_end, shape,
        shape.head_dim, shape.padded_dim, True,
    )  # fmt: skip
    v = load_tile(
        v_base, cache.v_block, cache.v_token, ids, start, kv_begin, kv_end, shape,
        shape.value_dim, shape.padded_value_dim, True,
    )  # fmt: skip
    return k, tl.where(is_new[:, None], 0, v).to(v.dtype)


@triton.jit
def _attend_first(
    q, k, v, is_new, new_k, new_v, sequence, kv_head, positions, start, kv_begin, kv_end, score, shape
):  # fmt: skip
    """Attend the tile that begins at key `start`; return a running softmax like empty_state's.

    The new key is not in k and v, which thus are in shared memory before it exists.
    """
    top, total, values = empty_state(shape)
    even, odd = float8_pairs.product_queries(join_pairs(q[0], q[1]), shape)
    score_factor, factor, v_scale = load_factors(score, sequence, kv_head, shape)
    new = tl.sum(
        q[0].to(tl.float32) * new_k[0].to(tl.float32) + q[1].to(tl.float32) * new_k[1].to(tl.float32), 1
    )
    product = tl.where(is_new[None, :], new[:, None], float8_pairs.key_products(even, odd, k, shape))
    weights, _, top, total = fold_scores(
        top, total, product, positions, total, start, kv_begin, kv_end,
        score_factor, factor, score, shape, True,
    )  # fmt: skip
    values, values_odd = float8_pairs.split_values(values, shape)
    values, values_odd = float8_pairs.add_values(values, values_odd, weights, v, shape)
    values = float8_pairs.join_values(values, values_odd, shape)
    new_weight = tl.sum(tl.where(is_new[None, :], weights, 0.0), 1)
    values += new_weight[:, None] * join_pairs(new_v[0].to(tl.float32), new_v[1].to(tl.float32))
    if shape.scaled:
        values *= v_scale
    return top, total, values


@triton.jit
def _store_split(pieces, number, top, total, values, shape):
    """Store a piece's result for _merge_splits."""
    out, lse = normalise(top, total, values)
    row = tl.arange(0, shape.rows)
    at = ((number * shape.rows + row) * shape.padded_value_dim)[:, None]
    at += tl.arange(0, shape.padded_value_dim)[None, :]
    valid = (row < shape.group)[:, None]
    tl.store(pieces.out + at, out, mask=valid)
    tl.store(pieces.lse + at, tl.broadcast_to(lse[:, None], out.shape), mask=valid)


@triton.jit
def _merge_splits(pieces, first, num_pieces, shape, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Fold the results of a sequence's pieces, in order, into a running softmax.

    Specification: octavo.attention.merge. Some are loaded at a time, as many as registers hold.
    """
    CHUNK: tl.constexpr = max(2, min(SPLITS, _MERGED_VALUES // (ROWS * shape.padded_value_dim)))
    row = tl.arange(0, ROWS)
    d = tl.arange(0, shape.padded_value_dim)
    valid = tl.broadcast_to((row < shape.group)[:, None], [ROWS, shape.padded_value_dim])
    top = tl.full(valid.shape, float("-inf"), tl.float32)
    total = tl.zeros(valid.shape, tl.float32)
    values = total
    for begin in range(0, num_pieces, CHUNK):
        outs = ()
        lses = ()
        new_top = top
        for index in tl.static_range(CHUNK):
            number = (first + begin + index) * shape.rows
            at = ((number + row) * shape.padded_value_dim)[:, None] + d[None, :]
            mask = valid & (begin + index < num_pieces)
            lse = tl.load(pieces.lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            outs = outs + (tl.load(pieces.out + at, mask=mask, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
            lses = lses + (lse,)  # noqa: RUF005
        for index in tl.static_range(CHUNK):
            new_top = tl.maximum(new_top, lses[index])
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        total *= shrink
        values *= shrink
        for index in tl.static_range(CHUNK):
            weight = tl.exp2(lses[index] - base)
            total += weight
            values += weight * outs[index]
        top = new_top
    return tl.max(top, 1), tl.max(total, 1), values


@triton.jit
def _finish(queries, token, kv_head, top, total, values, sinks, shape):
    """Let the sinks join, normalise, and write the first rows as the results of a token's queries."""
    row = tl.arange(0, values.shape[0])
    valid = row < shape.group
    head = kv_head * shape.group + row
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        values *= shrink[:, None]
        top = new_top
    out, lse = normalise(top, total, values)
    store_results(queries, row.to(tl.int64) * 0 + token, head, valid, out, lse, shape)
