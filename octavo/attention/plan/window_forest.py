"""The prefixes that sequences have in common, cut to what a window still shows of them.

A sequence sees the last `window` keys of its first query token, and those of its later ones. What lies before
may be gone: its entries of the block table hold anything, and are neither compared nor read.

    columns      0 1 2 3 4 5 6 7         A joins B where it begins to see: both have block 15 in column 4
    A            . . . . 15 16 17 21
    B            . . 13 14 15 16 22      node, columns 2 .. 5: all that its members see together
    C            . . . . . . . 41 42     C shares nothing

    1. kin      each row takes what it does not see from the row that sees its first block, and the most
    2. nodes    the LCP intervals of prefix_forest.py over the completed rows
    3. promotion by cost, parents first: each member reads only what it sees; one that sees nothing is none
"""

import numpy as np

from octavo.attention.lengths import cumulative
from octavo.attention.plan.prefix_forest import (
    Costs,
    SharedPrefixes,
    find_shared_prefixes,
    lcp_intervals,
    shareable_blocks,
    sort_rows,
)
from octavo.errors import InvalidArgumentError


def check_window(window: int | None) -> None:
    """Raise InvalidArgumentError if a plan's window is no number of tokens."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise InvalidArgumentError(f"window must be at least 1 token, or None for all; got {window!r}")


def first_seen_keys(seq_lens: np.ndarray, query_lens: np.ndarray, window: int) -> np.ndarray:
    """Return the first key that each sequence's first query token sees, [S]; at most seq_lens."""
    return np.clip(np.maximum(seq_lens - query_lens, 0) - window + 1, 0, seq_lens)


def find_prefixes(
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    block_size: int,
    costs: Costs,
    align_blocks: int = 1,
    window: int | None = None,
) -> SharedPrefixes:
    """Find the prefix forest of a step; arguments as for find_shared_prefixes.

    Args:
        seq_lens: [S] tokens in the cache, including the query tokens.
        window: of the layers; None: a token sees all keys before it. Nodes begin at the first block that a
            member sees, rounded down to align_blocks.
    """
    check_window(window)
    ends = shareable_blocks(seq_lens, query_lens, block_size)
    if window is None:
        return find_shared_prefixes(block_tables, ends, query_lens, block_size, costs, align_blocks)
    begins = first_seen_keys(seq_lens, query_lens, window) // block_size
    rows, kin = _find_kin(block_tables, begins, ends)
    if rows.size == 0:
        return SharedPrefixes.none()
    keys, lowest = _complete_rows(block_tables, begins, ends, rows, kin)
    order, common = sort_rows(keys, ends[rows] - lowest)
    rows = rows[order]
    nodes = lcp_intervals(((common + lowest) // align_blocks * align_blocks).tolist())
    # A query token sees what is less than a window before it.
    seen_by = window - 1 - (seq_lens - query_lens)[rows]
    return _promote(rows, nodes, begins[rows], query_lens[rows], seen_by, block_size, costs, align_blocks)


def _find_kin(
    block_tables: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that share a block with another one [R], and each sequence's kin [S].

    begins, ends: [S] blocks that each sequence sees and may share.
    """
    kin = np.arange(begins.shape[0])
    live = np.flatnonzero(begins < ends)
    # Blocks are found by all that precedes them: rows that share one also share where the later one begins.
    columns = np.unique(begins[live])
    row, at = np.nonzero((begins[live, None] <= columns) & (columns < ends[live, None]))
    row = live[row]
    block = block_tables[row, columns[at]]
    order = np.lexsort((begins[row], block, at))
    row, at, block = row[order], at[order], block[order]
    is_first = np.ones(row.shape[0], dtype=bool)
    is_first[1:] = (at[1:] != at[:-1]) | (block[1:] != block[:-1])
    group = np.cumsum(is_first) - 1
    begins_here = columns[at] == begins[row]
    kin[row[begins_here]] = row[is_first][group][begins_here]
    return np.unique(row[np.bincount(group)[group] > 1]), kin


def _complete_rows(
    block_tables: np.ndarray, begins: np.ndarray, ends: np.ndarray, rows: np.ndarray, kin: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the rows' block ids plus 1 from the first column on that one sees, and that column.

    A column that neither a row nor its kin sees is 0, and so are those after its last one.
    """
    lowest = int(begins[rows].min())
    columns = np.arange(lowest, int(ends[rows].max()))
    sees = (begins[rows, None] <= columns) & (columns < ends[rows, None])
    keys = np.where(sees, block_tables[rows[:, None], columns].astype(np.int64) + 1, 0)
    place = np.zeros(begins.shape[0], dtype=np.int64)
    place[rows] = np.arange(rows.shape[0])
    # Kin begin earlier, so they are complete when others take from them.
    for row in rows[np.argsort(begins[rows], kind="stable")]:
        if kin[row] != row:
            unseen = slice(0, int(begins[row]) - lowest)
            keys[place[row], unseen] = keys[place[kin[row]], unseen]
    return keys, lowest


def _promote(
    rows: np.ndarray,
    nodes: list[tuple[int, int, int]],
    begins: np.ndarray,
    query_lens: np.ndarray,
    seen_by: np.ndarray,
    block_size: int,
    costs: Costs,
    align_blocks: int,
) -> SharedPrefixes:
    """Keep a node if it pays, as prefix_forest._promote does, by what its members see of it.

    seen_by: [R] a row's leading query tokens that see a key, less the key's position.
    """
    covered = np.zeros(rows.shape[0], dtype=np.int64)
    members, num_tokens, kept = [], [], []
    saved_blocks = 0
    for depth, first, last in nodes:
        seeing = first + np.flatnonzero(begins[first : last + 1] < depth)
        if seeing.size < 2:
            continue
        seeing = seeing[np.argsort(begins[seeing], kind="stable")]
        above = int(covered[first])
        tokens = np.minimum(query_lens[seeing], depth * block_size + seen_by[seeing])
        own = depth - np.maximum(begins[seeing], above)
        num_read, total = int(own[0]), int(tokens.sum())
        saved = int(own @ -(-tokens // costs.tile_tokens)) - num_read * -(-total // costs.tile_tokens)
        if saved * block_size > costs.partial_tokens * total + costs.node_tokens:
            begin = max(above, int(begins[seeing[0]]) // align_blocks * align_blocks)
            kept.append((begin, depth))
            members.append(rows[seeing])
            num_tokens.append(tokens)
            saved_blocks += int(own.sum()) - num_read
            covered[first : last + 1] = depth
    if not kept:
        return SharedPrefixes.none()
    (begin, end), bounds = np.array(kept).T, cumulative(np.array([each.size for each in members]))
    rows, tokens = np.concatenate(members), np.concatenate(num_tokens)
    return SharedPrefixes(rows, tokens, bounds[:-1], bounds[1:] - 1, begin, end, saved_blocks)
