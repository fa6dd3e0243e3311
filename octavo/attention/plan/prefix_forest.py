"""Find the prefixes that block tables have in common, and judge which are worth reading only once."""

from dataclasses import dataclass

import numpy as np

TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """What sharing saves and costs, in units of 'one token's keys and values read from memory'.

    Attributes:
        partial_tokens: cost of one more partial result of one query token (written, read, merged).
        node_tokens: fixed cost of one more work item.
        tile_tokens: query tokens that read a segment together; more of them read it again.
    """

    partial_tokens: float = 15.0
    node_tokens: float = 24.0
    tile_tokens: int = TILE_TOKENS


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Segments that several sequences read together, parents before children.

        sequence A   [ node 0: blocks 0..3 ][ node 1: 4..6 ][ own blocks ]
        sequence B   [        same         ][     same     ][ own blocks ]
        sequence C   [        same         ][ own blocks ]

    Attributes:
        rows: [R] sequences that share anything, sorted so that every node's members are neighbours.
        first, last: [M] a node's members are rows[first : last + 1].
        block_begin, block_end: [M] blocks of its members' tables that the node covers.
    """

    rows: np.ndarray
    first: np.ndarray
    last: np.ndarray
    block_begin: np.ndarray
    block_end: np.ndarray

    @classmethod
    def none(cls) -> "SharedPrefixes":
        empty = np.zeros(0, dtype=np.int64)
        return cls(empty, empty, empty, empty, empty)


def find_shared_prefixes(
    block_tables: np.ndarray,
    num_shareable_blocks: np.ndarray,
    query_lens: np.ndarray,
    block_size: int,
    costs: Costs,
    align_blocks: int = 1,
) -> SharedPrefixes:
    """Find the prefix forest by equal leading block ids and keep the nodes that pay.

    Rows are sorted lexicographically, so that equal prefixes become neighbours; the lengths of the
    neighbours' common prefixes then enumerate every maximal shared run (the intervals of an
    LCP array). Source: Abouelhoda, Kurtz, Ohlebusch, "Replacing suffix trees with enhanced suffix
    arrays", 2004, here over block ids instead of letters.

    Args:
        block_tables: [S, max_blocks] int32 block ids.
        num_shareable_blocks: [S] leading blocks a sequence may share; later entries are never read.
        query_lens: [S] query tokens of each sequence.
        block_size: tokens in a block.
        costs: what a node saves and costs.
        align_blocks: nodes begin and end at multiples of this many blocks.
    """
    rows = _rows_with_common_first_block(block_tables, num_shareable_blocks)
    if rows.size == 0:
        return SharedPrefixes.none()
    order, common = _sort_rows(block_tables, num_shareable_blocks, rows)
    rows = rows[order]
    nodes = _lcp_intervals((common // align_blocks * align_blocks).tolist())
    return _promote(rows, nodes, query_lens[rows], block_size, costs)


def _rows_with_common_first_block(block_tables: np.ndarray, num_shareable_blocks: np.ndarray) -> np.ndarray:
    """Rows that share nothing drop out here, before any whole row is looked at."""
    rows = np.flatnonzero(num_shareable_blocks > 0)
    if rows.size < 2:
        return rows[:0]
    first_blocks = block_tables[rows, 0]
    by_block = np.argsort(first_blocks, kind="stable")
    equals_next = first_blocks[by_block[1:]] == first_blocks[by_block[:-1]]
    shared = np.zeros(rows.size, dtype=bool)
    shared[by_block[1:]] = equals_next
    shared[by_block[:-1]] |= equals_next
    return rows[shared]


def _sort_rows(
    block_tables: np.ndarray, num_shareable_blocks: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (order [R], blocks in common of neighbours [R - 1]) of the rows in lexicographic order."""
    lengths = num_shareable_blocks[rows]
    width = int(lengths.max())
    in_use = np.arange(width) < lengths[:, None]
    # Ids move up by one so that 0 marks a row's end; big-endian bytes compare like the numbers.
    keys = np.where(in_use, block_tables[rows, :width].astype(np.int64) + 1, 0).astype(">u4")
    order = np.argsort(keys.view(f"V{4 * width}").ravel())
    keys, lengths = keys[order], lengths[order]
    differs = keys[1:] != keys[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return order, np.minimum(common, np.minimum(lengths[1:], lengths[:-1]))


def _lcp_intervals(common: list[int]) -> list[tuple[int, int, int]]:
    """Return every maximal shared run as (depth in blocks, first row, last row), parents first."""
    nodes: list[tuple[int, int, int]] = []
    open_nodes = [(0, 0)]
    for row, depth in enumerate([*common, 0], start=1):
        first = row - 1
        while open_nodes[-1][0] > depth:
            closed_depth, first = open_nodes.pop()
            nodes.append((closed_depth, first, row - 1))
        if depth > open_nodes[-1][0]:
            open_nodes.append((depth, first))
    return nodes[::-1]


def _promote(
    rows: np.ndarray,
    nodes: list[tuple[int, int, int]],
    query_lens: np.ndarray,
    block_size: int,
    costs: Costs,
) -> SharedPrefixes:
    """Keep a node where the reads it saves outweigh its partials; its children inherit what is not kept."""
    tokens_before = [0, *np.cumsum(query_lens).tolist()]
    reads_before = [0, *np.cumsum(-(-query_lens // costs.tile_tokens)).tolist()]
    covered = [0] * len(rows)
    kept: list[tuple[int, int, int, int]] = []
    for depth, first, last in nodes:
        num_tokens = tokens_before[last + 1] - tokens_before[first]
        shared_reads = -(-num_tokens // costs.tile_tokens)
        saved_reads = reads_before[last + 1] - reads_before[first] - shared_reads
        saved = saved_reads * (depth - covered[first]) * block_size
        if saved > costs.partial_tokens * num_tokens + costs.node_tokens:
            kept.append((first, last, covered[first], depth))
            covered[first : last + 1] = [depth] * (last + 1 - first)
    if not kept:
        return SharedPrefixes.none()
    first, last, begin, end = np.array(kept, dtype=np.int64).T
    return SharedPrefixes(rows, first, last, begin, end)
