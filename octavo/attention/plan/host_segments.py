"""Cut a step into work items: segments of the KV cache, and the query tokens that read them. NumPy only.

The example of prefix_forest.py, with the sequences in the order A B C D E F:

    find_segments    segment     keys          read by        through the block-table row of
                     node 0      0 : 32        C E            C
                     node 1      0 : 32        D A F          D
                     leaf A     32 : len(A)    A              A          causal
                     leaf B      0 : len(B)    B              B          causal
                     ...

    cut_queries      node 1, tiles of 2 tokens:       D A | F            each tile reads all keys of the node
                     leaf of 150 queries, tiles of 64:  64 | 64 | 22    an earlier tile ends at its last query

    cut_keys         a segment of 1300 keys that one tile reads:  0 : 512 | 512 : 1024 | 1024 : 1300
                                   1200 keys:                     0 : 512 | 512 : 1200

Each row that cut_keys returns is an item.
"""

from dataclasses import dataclass

import numpy as np

from octavo.attention.lengths import Lengths, concatenated_ranges, cumulative, expand
from octavo.attention.plan.prefix_forest import SharedPrefixes
from octavo.attention.plan.window_forest import first_seen_keys


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments before they are cut: the query tokens pool[pool_begin[i] : pool_end[i]] read segment i.

    In a leaf (causal 1), a tile's keys end one key earlier for each query token after the tile.
    """

    pool: np.ndarray
    table_row: np.ndarray
    kv_begin: np.ndarray
    kv_end: np.ndarray
    pool_begin: np.ndarray
    pool_end: np.ndarray
    causal: np.ndarray


def find_segments(
    lengths: Lengths,
    shared: SharedPrefixes,
    block_size: int,
    kv_begin: np.ndarray | None = None,
    window: int | None = None,
) -> Segments:
    """List the shared nodes, parents first, and then the leaves: each sequence's own part.

    Args:
        kv_begin: [S] the first key of each sequence, if nothing is shared; None: 0.
        window: leaves begin at the first key that their sequence sees; None: it sees all.
    """
    seq_lens, cu_seqlens_q, query_lens = lengths
    num_sequences, num_tokens = seq_lens.shape[0], int(cu_seqlens_q[-1])
    leaf_begin = shared.leaf_begin(num_sequences, block_size)
    if kv_begin is not None:
        leaf_begin = np.minimum(kv_begin, seq_lens)
    if window is not None:
        leaf_begin = np.maximum(leaf_begin, first_seen_keys(seq_lens, query_lens, window))
    pool = concatenated_ranges(cu_seqlens_q[shared.rows], shared.num_tokens)
    bounds = cumulative(shared.num_tokens)
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


def cut_queries(
    segments: Segments, tile_tokens: int, right: int | None = 0, window: int | None = None
) -> tuple[np.ndarray, ...]:
    """Cut each segment's query tokens into tiles.

    Args:
        segments: of the step.
        tile_tokens: most query tokens of a tile.
        right: keys after its position that a token sees; None: all.
        window: keys that it sees up to its position; None: all.

    Returns:
        (table row, kv begin, kv end, pool begin, pool end, is_single: the tile is its segment's only one).
    """
    num_tiles = -(-(segments.pool_end - segments.pool_begin) // tile_tokens)
    is_single = num_tiles == 1
    if is_single.all():
        # There is nothing to cut, as in every step that only decodes.
        row, kv_begin, kv_end = segments.table_row, segments.kv_begin, segments.kv_end
        return row, kv_begin, np.maximum(kv_end, kv_begin), segments.pool_begin, segments.pool_end, is_single
    segment, index = expand(num_tiles)
    pool_begin = segments.pool_begin[segment] + index * tile_tokens
    pool_end = np.minimum(pool_begin + tile_tokens, segments.pool_end[segment])
    later_tokens = segments.pool_end[segment] - pool_end
    if right != 0:
        later_tokens = 0 if right is None else np.maximum(later_tokens - right, 0)
    kv_begin, is_leaf = segments.kv_begin[segment], segments.causal[segment] == 1
    if window is not None:
        first_position = segments.kv_end[segment] - (segments.pool_end[segment] - pool_begin)
        kv_begin = np.where(
            is_leaf, np.maximum(kv_begin, np.maximum(first_position, 0) - window + 1), kv_begin
        )
    kv_end = np.maximum(segments.kv_end[segment] - is_leaf * later_tokens, kv_begin)
    return segments.table_row[segment], kv_begin, kv_end, pool_begin, pool_end, is_single[segment]


def cut_keys(tiles: tuple[np.ndarray, ...], split_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut long segments that only one tile reads at multiples of split_tokens; no part is shorter than half.

    Positions are absolute, so a cut does not move while a sequence grows.

    Returns:
        (table row, kv begin, kv end, pool begin, pool end) of the items.
    """
    table_row, kv_begin, kv_end, pool_begin, pool_end, is_single = tiles
    half = split_tokens // 2
    first_cut = -(-(kv_begin + half) // split_tokens)
    last_cut = (kv_end - half) // split_tokens
    num_parts = np.where(is_single, np.maximum(last_cut - first_cut + 1, 0), 0) + 1
    if (num_parts == 1).all():
        return tiles[:-1]
    tile, part = expand(num_parts)
    cut = (first_cut[tile] + part) * split_tokens
    begin = np.where(part == 0, kv_begin[tile], cut - split_tokens)
    end = np.where(part == num_parts[tile] - 1, kv_end[tile], cut)
    return table_row[tile], begin, end, pool_begin[tile], pool_end[tile]
