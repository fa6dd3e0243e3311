"""The work list of one step's attention: which query tokens read which segments of the KV cache.

NumPy only: the plan is made on the host, once per step, and serves every layer and every kernel.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from octavo.attention.plan.prefix_forest import TILE_TOKENS, Costs, SharedPrefixes, find_shared_prefixes

SPLIT_TOKENS = 512


@dataclass(frozen=True)
class ForestPlan:
    """Work items over a forest of shared prefixes; without sharing, one tree per sequence.

    An item is one read of one segment for a tile of query tokens. Each (item, token) pair gives one
    partial result. A token's partials cover its visible keys exactly once and are merged root to leaf.

        item 0   tokens 0 1 2   [shared prefix ]
        item 1   token  0                       [own part of sequence 0]
        item 2   tokens 1 2                     [own part of sequence 1]

    Positions still decide what a token sees: the plan may list keys that a causal or window mask hides.

    Attributes:
        item_table_row: [I] int32, block-table row through which the segment is read.
        item_kv_begin: [I] int32, first token of the segment in that row's sequence.
        item_kv_end: [I] int32, one past the segment's last token.
        item_token_begin: [I + 1] int32, item i is read by item_tokens[begin[i] : begin[i + 1]].
        item_tokens: [P] int32, query tokens (rows of q).
        item_slots: [P] int32, slot of the pair's partial result; -1: the token has only this one, which
            is its output.
        item_order: [I] int32, items by falling work, so that threads finish together.
        merge_begin: [T + 1] int32, token t's partials are the slots merge_begin[t] : merge_begin[t + 1].
        num_partials: slots in all.
        num_sequences: S, rows the block table must have.
        max_kv_len: largest item_kv_end, in tokens.
        max_item_tokens: most query tokens of an item.
        kv_tokens_flat: tokens of KV that are read if no sequence shares.
        kv_tokens_read: tokens of KV that this plan reads.
    """

    item_table_row: np.ndarray
    item_kv_begin: np.ndarray
    item_kv_end: np.ndarray
    item_token_begin: np.ndarray
    item_tokens: np.ndarray
    item_slots: np.ndarray
    item_order: np.ndarray
    merge_begin: np.ndarray
    num_partials: int
    num_sequences: int
    max_kv_len: int
    max_item_tokens: int
    kv_tokens_flat: int
    kv_tokens_read: int

    @classmethod
    def flat(
        cls,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        *,
        tile_tokens: int = TILE_TOKENS,
        split_tokens: int = SPLIT_TOKENS,
    ) -> "ForestPlan":
        """Plan each sequence by itself.

        A sequence's items depend on its own lengths only, never on its neighbours or on the number of
        threads, so that its result is the same bits in every batch.

        Args:
            seq_lens: [S] int32, tokens in the cache, the query tokens included.
            cu_seqlens_q: [S + 1] int32, cumulative query lengths.
            tile_tokens: query tokens that read a segment together.
            split_tokens: long segments with one query tile are cut at multiples of this position.
        """
        return _plan(
            np.asarray(seq_lens, dtype=np.int64),
            np.asarray(cu_seqlens_q, dtype=np.int64),
            SharedPrefixes.none(),
            block_size=1,
            tile_tokens=tile_tokens,
            split_tokens=split_tokens,
        )

    @classmethod
    def from_block_tables(
        cls,
        block_tables: np.ndarray,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        block_size: int,
        *,
        costs: Costs | None = None,
        split_tokens: int = SPLIT_TOKENS,
    ) -> "ForestPlan":
        """Plan a step in which blocks with equal leading ids are read once for all their sequences.

        Only blocks wholly before every member's first query token are shared, so a shared segment needs
        no causal mask. Sequences without query tokens or without cached tokens are legal.

        Args:
            block_tables: [S, max_blocks] int32; entries past a sequence's last block are never read.
            seq_lens: [S] int32, tokens in the cache, the query tokens included.
            cu_seqlens_q: [S + 1] int32, cumulative query lengths.
            block_size: tokens in a block.
            costs: what sharing saves and costs; None: measured for a CPU.
            split_tokens: long segments with one query tile are cut at multiples of this position.
        """
        costs = Costs() if costs is None else costs
        seq_lens = np.asarray(seq_lens, dtype=np.int64)
        cu_seqlens_q = np.asarray(cu_seqlens_q, dtype=np.int64)
        query_lens = np.diff(cu_seqlens_q)
        num_shareable = np.where(query_lens > 0, np.maximum(seq_lens - query_lens, 0) // block_size, 0)
        shared = find_shared_prefixes(block_tables, num_shareable, query_lens, block_size, costs)
        return _plan(
            seq_lens,
            cu_seqlens_q,
            shared,
            block_size=block_size,
            tile_tokens=costs.tile_tokens,
            split_tokens=split_tokens,
        )

    @property
    def num_items(self) -> int:
        return self.item_table_row.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens the plan covers."""
        return self.merge_begin.shape[0] - 1

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Memory addresses of the arrays in field order, for a kernel called through ctypes."""
        arrays = (
            self.item_table_row,
            self.item_kv_begin,
            self.item_kv_end,
            self.item_token_begin,
            self.item_tokens,
            self.item_slots,
            self.item_order,
            self.merge_begin,
        )
        return tuple(array.ctypes.data for array in arrays)


@dataclass(frozen=True, slots=True)
class _Segments:
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


def _plan(
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    shared: SharedPrefixes,
    *,
    block_size: int,
    tile_tokens: int,
    split_tokens: int,
) -> ForestPlan:
    segments = _segments(seq_lens, cu_seqlens_q, shared, block_size)
    items = _split(_tile(segments, tile_tokens), split_tokens)
    return _assemble(segments.pool, items, seq_lens, cu_seqlens_q, tile_tokens)


def _segments(
    seq_lens: np.ndarray, cu_seqlens_q: np.ndarray, shared: SharedPrefixes, block_size: int
) -> _Segments:
    """List the shared nodes, roots first, and after them each sequence's own part."""
    num_sequences, num_tokens = seq_lens.shape[0], int(cu_seqlens_q[-1])
    leaf_begin = np.zeros(num_sequences, dtype=np.int64)
    for first, last, end in zip(shared.first, shared.last, shared.block_end, strict=True):
        leaf_begin[shared.rows[first : last + 1]] = end * block_size
    query_lens = np.diff(cu_seqlens_q)[shared.rows]
    pool = concatenated_ranges(cu_seqlens_q[shared.rows], query_lens)
    bounds = np.concatenate([[0], np.cumsum(query_lens)])
    num_nodes = shared.first.shape[0]
    return _Segments(
        pool=np.concatenate([pool, np.arange(num_tokens)]),
        table_row=np.concatenate([shared.rows[shared.first], np.arange(num_sequences)]),
        kv_begin=np.concatenate([shared.block_begin * block_size, leaf_begin]),
        kv_end=np.concatenate([shared.block_end * block_size, seq_lens]),
        pool_begin=np.concatenate([bounds[shared.first], cu_seqlens_q[:-1] + pool.shape[0]]),
        pool_end=np.concatenate([bounds[shared.last + 1], cu_seqlens_q[1:] + pool.shape[0]]),
        causal=np.repeat([0, 1], [num_nodes, num_sequences]),
    )


def _tile(segments: _Segments, tile_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut each segment's query tokens into tiles; returns (row, kv begin, kv end, pool begin, end, alone)."""
    num_tiles = -(-(segments.pool_end - segments.pool_begin) // tile_tokens)
    segment = np.repeat(np.arange(num_tiles.shape[0]), num_tiles)
    index = np.arange(segment.shape[0]) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    pool_begin = segments.pool_begin[segment] + index * tile_tokens
    pool_end = np.minimum(pool_begin + tile_tokens, segments.pool_end[segment])
    later_tokens = segments.pool_end[segment] - pool_end
    kv_begin = segments.kv_begin[segment]
    kv_end = np.maximum(segments.kv_end[segment] - segments.causal[segment] * later_tokens, kv_begin)
    return segments.table_row[segment], kv_begin, kv_end, pool_begin, pool_end, num_tiles[segment] == 1


def _split(tiles: tuple[np.ndarray, ...], split_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut long segments that only one tile reads at multiples of split_tokens, leaving no short ends.

    Positions are absolute, so a cut does not move while a sequence grows.
    """
    table_row, kv_begin, kv_end, pool_begin, pool_end, alone = tiles
    half = split_tokens // 2
    first_cut = -(-(kv_begin + half) // split_tokens)
    last_cut = (kv_end - half) // split_tokens
    num_parts = np.where(alone, np.maximum(last_cut - first_cut + 1, 0), 0) + 1
    tile = np.repeat(np.arange(num_parts.shape[0]), num_parts)
    part = np.arange(tile.shape[0]) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    cut = (first_cut[tile] + part) * split_tokens
    begin = np.where(part == 0, kv_begin[tile], cut - split_tokens)
    end = np.where(part == num_parts[tile] - 1, kv_end[tile], cut)
    return table_row[tile], begin, end, pool_begin[tile], pool_end[tile]


def _assemble(
    pool: np.ndarray,
    items: tuple[np.ndarray, ...],
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    tile_tokens: int,
) -> ForestPlan:
    table_row, kv_begin, kv_end, pool_begin, pool_end = items
    num_item_tokens = pool_end - pool_begin
    tokens = pool[concatenated_ranges(pool_begin, num_item_tokens)]
    slots, merge_begin = _partial_slots(tokens, int(cu_seqlens_q[-1]))
    kv_lens = kv_end - kv_begin
    return ForestPlan(
        item_table_row=table_row.astype(np.int32),
        item_kv_begin=kv_begin.astype(np.int32),
        item_kv_end=kv_end.astype(np.int32),
        item_token_begin=np.concatenate([[0], np.cumsum(num_item_tokens)]).astype(np.int32),
        item_tokens=tokens.astype(np.int32),
        item_slots=slots,
        # Reading dominates for few tokens and arithmetic for many; their sum ranks items well enough.
        item_order=np.argsort(-kv_lens * (8 + num_item_tokens), kind="stable").astype(np.int32),
        merge_begin=merge_begin,
        num_partials=int(merge_begin[-1]),
        num_sequences=seq_lens.shape[0],
        max_kv_len=int(kv_end.max(initial=0)),
        max_item_tokens=int(num_item_tokens.max(initial=0)),
        kv_tokens_flat=_flat_reads(seq_lens, np.diff(cu_seqlens_q), tile_tokens),
        kv_tokens_read=int(kv_lens.sum()),
    )


def _partial_slots(tokens: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the partials token by token, in item order (root first); a lone partial gets -1."""
    counts = np.bincount(tokens, minlength=num_tokens)
    slots = np.full(tokens.shape[0], -1, dtype=np.int32)
    several = counts > 1
    if several.any():
        by_token = np.argsort(tokens, kind="stable")
        by_token = by_token[several[tokens[by_token]]]
        slots[by_token] = np.arange(by_token.shape[0])
    merge_begin = np.concatenate([[0], np.cumsum(np.where(several, counts, 0))])
    return slots, merge_begin.astype(np.int32)


def _flat_reads(seq_lens: np.ndarray, query_lens: np.ndarray, tile_tokens: int) -> int:
    """Tokens read if no sequence shares: tile i of n ends (n - 1 - i) tiles before the sequence does."""
    num_tiles = -(-query_lens // tile_tokens)
    last_tile = query_lens - (num_tiles - 1) * tile_tokens
    cut_off = (num_tiles - 1) * last_tile + (num_tiles - 1) * (num_tiles - 2) // 2 * tile_tokens
    return int(np.where(query_lens > 0, np.maximum(num_tiles * seq_lens - cut_off, 0), 0).sum())


def concatenated_ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begins[0] .. begins[0] + lengths[0] - 1, then the next range, and so on: [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
