"""Find the prefixes that block tables have in common, and keep those that are worth sharing.

An example of six sequences and their shareable block ids:

    1. sort the rows; common = blocks that a row has in common with the row before

        row   sequence   block ids     common
        0     D          1 2 3 4         -      | 1 | 2 | 3 |
        1     A          1 2 3 5         3      | 1 | 2 | 3 |
        2     F          1 2 6           2      | 1 | 2 |
        3     B          1 7             1      | 1 |
        4     C          8 9             0      | 8   9 |
        5     E          8 9 4           2      | 8   9 |

    2. LCP intervals: a maximal run of rows, all with at least `depth` blocks in common, is a node

        depth 1   rows 0 .. 3   D A F B       root of the first tree
        depth 2   rows 0 .. 2   D A F
        depth 3   rows 0 .. 1   D A
        depth 2   rows 4 .. 5   C E           root of the second tree

       One pass over `common` with a stack of open runs finds them: a larger number opens a run, a smaller one
       closes all deeper runs.

    3. promotion by cost, parents first: a node is kept if it saves more reads than its partial results cost;
       otherwise its children inherit its blocks. Here with 16 tokens in a block, one query token in each
       sequence, 15 for a partial result and 0 for a node:

        C E       2 blocks   saves 1 x 32 = 32   costs 2 x 15 = 30   kept: node 0, blocks 0 and 1
        D A F B   1 block    saves 3 x 16 = 48   costs 4 x 15 = 60   not kept
        D A F     2 blocks   saves 2 x 32 = 64   costs 3 x 15 = 45   kept: node 1, blocks 0 and 1
        D A       1 block    saves 1 x 16 = 16   costs 2 x 15 = 30   not kept

The keys of a sequence after its last node are its leaf. host_plan.py and node_plan.py cut this table into
work. For layers with a window, window_forest.py cuts the nodes to what their members see.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of sharing. The unit is reading one token's keys and values from memory.

    Attributes:
        partial_tokens: cost of one more partial result of one query token (written, read, merged).
        node_tokens: fixed cost of one more work item.
        tile_tokens: query tokens that read a segment together; every further tile reads it again.
    """

    partial_tokens: float = 15.0
    node_tokens: float = 24.0
    tile_tokens: int = TILE_TOKENS


class Sharing(NamedTuple):
    """What sharing saves, in one step or in all steps of an engine so far.

    Attributes:
        num_nodes: shared prefixes of the step, or of the last one.
        saved_tokens: tokens of keys and values that one layer did not read because they are shared.
    """

    num_nodes: int = 0
    saved_tokens: int = 0

    def after(self, step: "Sharing") -> "Sharing":
        """Return the figures after one more step."""
        return Sharing(step.num_nodes, self.saved_tokens + step.saved_tokens)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Nodes: runs of blocks that several sequences share, parents before children.

        sequence A   [ node 0: blocks 0..3 ][ node 1: 4..6 ][ own blocks ]
        sequence B   [        same         ][     same     ][ own blocks ]
        sequence C   [        same         ][ own blocks ]

    Attributes:
        rows: [R] sequences that share blocks, sorted so that every node's members are neighbours.
        num_tokens: [R] leading query tokens of each row that read the nodes.
        first, last: [M] a node's members are rows[first : last + 1]; rows[first] sees all of the node.
        block_begin, block_end: [M] blocks of its members' tables that the node covers.
        saved_blocks: reads of blocks that the nodes save.
    """

    rows: np.ndarray
    num_tokens: np.ndarray
    first: np.ndarray
    last: np.ndarray
    block_begin: np.ndarray
    block_end: np.ndarray
    saved_blocks: int

    @classmethod
    def none(cls) -> "SharedPrefixes":
        empty = np.zeros(0, dtype=np.int64)
        return cls(empty, empty, empty, empty, empty, empty, 0)

    def sharing(self, block_size: int) -> Sharing:
        """Return how many nodes there are and what they save."""
        return Sharing(self.first.shape[0], self.saved_blocks * block_size)

    def leaf_begin(self, num_sequences: int, block_size: int) -> np.ndarray:
        """Return how many leading tokens of each sequence nodes cover: [num_sequences] int64."""
        leaf_begin = np.zeros(num_sequences, dtype=np.int64)
        for first, last, end in zip(self.first, self.last, self.block_end, strict=True):
            leaf_begin[self.rows[first : last + 1]] = end * block_size
        return leaf_begin


def shareable_blocks(seq_lens: np.ndarray, query_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Return how many leading blocks each sequence may share: [S] int64.

    These are the full blocks before its first query token, so that a node needs no causal mask. A sequence
    without queries shares none.
    """
    return np.where(query_lens > 0, np.maximum(seq_lens - query_lens, 0) // block_size, 0)


def find_shared_prefixes(
    block_tables: np.ndarray,
    num_shareable_blocks: np.ndarray,
    query_lens: np.ndarray,
    block_size: int,
    costs: Costs,
    align_blocks: int = 1,
) -> SharedPrefixes:
    """Find the prefix forest by equal leading block ids and keep the nodes that pay.

    Rows are sorted lexicographically, so that equal prefixes become neighbours. The lengths of the
    neighbours' common prefixes then enumerate every maximal shared run: the intervals of an LCP array, here
    over block ids instead of letters.

    Source: Abouelhoda, Kurtz, Ohlebusch, "Replacing suffix trees with enhanced suffix arrays", 2004.

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
    lengths = num_shareable_blocks[rows]
    width = int(lengths.max())
    # Ids move up by one so that 0 marks a row's end.
    in_use = np.arange(width) < lengths[:, None]
    keys = np.where(in_use, block_tables[rows, :width].astype(np.int64) + 1, 0)
    order, common = sort_rows(keys, lengths)
    rows = rows[order]
    nodes = lcp_intervals((common // align_blocks * align_blocks).tolist())
    return _promote(rows, nodes, query_lens[rows], block_size, costs)


def _rows_with_common_first_block(block_tables: np.ndarray, num_shareable_blocks: np.ndarray) -> np.ndarray:
    """Return the rows whose first block another row has too; only these need a look at the whole row."""
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


def sort_rows(keys: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort rows lexicographically; return (order [R], columns that neighbours have in common [R - 1]).

    Args:
        keys: [R, width] integers, not negative.
        lengths: [R] columns of each row; what follows is 0.
    """
    width = keys.shape[1]
    # Big-endian bytes compare like the numbers.
    keys = keys.astype(">u4")
    order = np.argsort(keys.view(f"V{4 * width}").ravel())
    keys, lengths = keys[order], lengths[order]
    differs = keys[1:] != keys[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return order, np.minimum(common, np.minimum(lengths[1:], lengths[:-1]))


def lcp_intervals(common: list[int]) -> list[tuple[int, int, int]]:
    """Return every maximal shared run as (depth in blocks, first row, last row), parents first.

    common [3, 2, 1, 0, 2]  ->  [(2, 4, 5), (1, 0, 3), (2, 0, 2), (3, 0, 1)]
    """
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
    rows: np.ndarray, nodes: list[tuple[int, int, int]], query_lens: np.ndarray, block_size: int, costs: Costs
) -> SharedPrefixes:
    """Keep a node if its saved reads outweigh its partial results; else its children inherit its blocks."""
    tokens_before = [0, *np.cumsum(query_lens).tolist()]
    reads_before = [0, *np.cumsum(-(-query_lens // costs.tile_tokens)).tolist()]
    covered = [0] * len(rows)
    kept: list[tuple[int, int, int, int]] = []
    saved_blocks = 0
    for depth, first, last in nodes:
        num_tokens = tokens_before[last + 1] - tokens_before[first]
        shared_reads = -(-num_tokens // costs.tile_tokens)
        saved_reads = reads_before[last + 1] - reads_before[first] - shared_reads
        saved = saved_reads * (depth - covered[first]) * block_size
        if saved > costs.partial_tokens * num_tokens + costs.node_tokens:
            kept.append((first, last, covered[first], depth))
            saved_blocks += (last - first) * (depth - covered[first])
            covered[first : last + 1] = [depth] * (last + 1 - first)
    if not kept:
        return SharedPrefixes.none()
    first, last, begin, end = np.array(kept, dtype=np.int64).T
    return SharedPrefixes(rows, query_lens, first, last, begin, end, saved_blocks)
