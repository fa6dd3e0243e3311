"""Cut a step into work items: segments of the KV cache and the query tokens that read them. NumPy only."""

from dataclasses import dataclass

import numpy as np

from octavo.attention.lengths import Lengths
from octavo.attention.prefix_forest import SharedPrefixes


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments before tiling: segment i is read by pool[pool_begin[i] : pool_end[i]].

    A leaf (causal 1) ends one key earlier for each query token after the tile; a shared node does not.
    """

    pool: np.ndarray
    table_row: np.ndarray
    kv_begin: np.ndarray
    kv_end: np.ndarray
    pool_begin: np.ndarray
    pool_end: np.ndarray
    causal: np.ndarray


def find_segments(lengths: Lengths, shared: SharedPrefixes, block_size: int) -> Segments:
    """List the shared nodes, roots first, and after them each sequence's own part."""
    seq_lens, cu_seqlens_q, query_lens = lengths
    num_sequences, num_tokens = seq_lens.shape[0], int(cu_seqlens_q[-1])
    leaf_begin = np.zeros(num_sequences, dtype=np.int64)
    for first, last, end in zip(shared.first, shared.last, shared.block_end, strict=True):
        leaf_begin[shared.rows[first : last + 1]] = end * block_size
    query_lens = query_lens[shared.rows]
    pool = concatenated_ranges(cu_seqlens_q[shared.rows], query_lens)
    bounds = cumulative(query_lens)
    num_nodes = shared.first.shape[0]
    return Segments(
        pool=np.concatenate([pool, np.arange(num_tokens)]),
        table_row=np.concatenate([shared.rows[shared.first], np.arange(num_sequences)]),
        kv_begin=np.concatenate([shared.block_begin * block_size, leaf_begin]),
        kv_end=np.concatenate([shared.block_end * block_size, seq_lens]),
        pool_begin=np.concatenate([bounds[shared.first], cu_seqlens_q[:-1] + pool.shape[0]]),
        pool_end=np.concatenate([bounds[shared.last + 1], cu_seqlens_q[1:] + pool.shape[0]]),
        causal=np.repeat([0, 1], [num_nodes, num_sequences]),
    )


def cut_queries(segments: Segments, tile_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut each segment's query tokens into tiles; returns (row, kv begin, kv end, pool begin, end, alone)."""
    num_tiles = -(-(segments.pool_end - segments.pool_begin) // tile_tokens)
    alone = num_tiles == 1
    if alone.all():
        # Every decode step: nothing to cut.
        row, kv_begin, kv_end = segments.table_row, segments.kv_begin, segments.kv_end
        return row, kv_begin, np.maximum(kv_end, kv_begin), segments.pool_begin, segments.pool_end, alone
    segment = np.repeat(np.arange(num_tiles.shape[0]), num_tiles)
    index = np.arange(segment.shape[0]) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    pool_begin = segments.pool_begin[segment] + index * tile_tokens
    pool_end = np.minimum(pool_begin + tile_tokens, segments.pool_end[segment])
    later_tokens = segments.pool_end[segment] - pool_end
    kv_begin = segments.kv_begin[segment]
    kv_end = np.maximum(segments.kv_end[segment] - segments.causal[segment] * later_tokens, kv_begin)
    return segments.table_row[segment], kv_begin, kv_end, pool_begin, pool_end, alone[segment]


def cut_keys(tiles: tuple[np.ndarray, ...], split_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut long segments that only one tile reads at multiples of split_tokens, leaving no short ends.

    Positions are absolute, so a cut does not move while a sequence grows.
    """
    table_row, kv_begin, kv_end, pool_begin, pool_end, alone = tiles
    half = split_tokens // 2
    first_cut = -(-(kv_begin + half) // split_tokens)
    last_cut = (kv_end - half) // split_tokens
    num_parts = np.where(alone, np.maximum(last_cut - first_cut + 1, 0), 0) + 1
    if (num_parts == 1).all():
        return tiles[:-1]
    tile = np.repeat(np.arange(num_parts.shape[0]), num_parts)
    part = np.arange(tile.shape[0]) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    cut = (first_cut[tile] + part) * split_tokens
    begin = np.where(part == 0, kv_begin[tile], cut - split_tokens)
    end = np.where(part == num_parts[tile] - 1, kv_end[tile], cut)
    return table_row[tile], begin, end, pool_begin[tile], pool_end[tile]


def count_flat_reads(seq_lens: np.ndarray, query_lens: np.ndarray, tile_tokens: int) -> int:
    """Tokens read if no sequence shares: tile i of n ends (n - 1 - i) tiles before the sequence does."""
    num_tiles = -(-query_lens // tile_tokens)
    last_tile = query_lens - (num_tiles - 1) * tile_tokens
    cut_off = (num_tiles - 1) * last_tile + (num_tiles - 1) * (num_tiles - 2) // 2 * tile_tokens
    return int(np.where(query_lens > 0, np.maximum(num_tiles * seq_lens - cut_off, 0), 0).sum())


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """Return 0, lengths[0], lengths[0] + lengths[1] and so on: [n + 1] int64."""
    sums = np.zeros(lengths.shape[0] + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def concatenated_ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begins[0] .. begins[0] + lengths[0] - 1, then the next range, and so on: [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
