"""How the shared nodes of a step are cut into segments of keys, so that all programs of a GPU have work.

NumPy only.
"""

from dataclasses import dataclass

import numpy as np

from octavo.attention.plan_segments import concatenated_ranges
from octavo.attention.prefix_forest import Costs, SharedPrefixes

# A node with few tokens is read by so many thin tiles before a fat one is cheaper.
_MAX_THIN_TILES = 2
# Segments of a node that are tried.
_MAX_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class NodeTiling:
    """How a kernel wants nodes to be cut; a thin tile has few query tokens, a fat one many.

    Attributes:
        thin_tokens, fat_tokens: query tokens of a tile; thin_tokens 0: all are fat.
        thin_programs, fat_programs: programs that run side by side.
        num_kv_heads: KH; a program works for one at a time.
        align_tokens: nodes and their segments begin and end at multiples of this many keys.
        min_segment_tokens: shorter segments are not made of long ones.
    """

    thin_tokens: int
    fat_tokens: int
    thin_programs: int
    fat_programs: int
    num_kv_heads: int
    align_tokens: int = 64
    min_segment_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Nodes:
    """Shared nodes, parents first; node i's query tokens are pool[token_begin[i] :][: num_tokens[i]]."""

    kv_begin: np.ndarray
    kv_end: np.ndarray
    pool: np.ndarray
    token_begin: np.ndarray
    num_tokens: np.ndarray
    is_thin: np.ndarray
    tile_tokens: np.ndarray
    num_tiles: np.ndarray


def gather_nodes(
    shared: SharedPrefixes, cu_seqlens_q: np.ndarray, block_size: int, tiling: NodeTiling
) -> Nodes:
    """List the query tokens of shared runs of blocks, and how many tiles they make."""
    query_lens = np.diff(cu_seqlens_q)[shared.rows]
    bounds = np.concatenate([[0], np.cumsum(query_lens)])
    num_tokens = bounds[shared.last + 1] - bounds[shared.first]
    is_thin = num_tokens <= _MAX_THIN_TILES * tiling.thin_tokens
    tile_tokens = np.where(is_thin, tiling.thin_tokens, tiling.fat_tokens)
    return Nodes(
        kv_begin=shared.block_begin * block_size,
        kv_end=shared.block_end * block_size,
        pool=concatenated_ranges(cu_seqlens_q[shared.rows], query_lens),
        token_begin=bounds[shared.first],
        num_tokens=num_tokens,
        is_thin=is_thin,
        tile_tokens=tile_tokens,
        num_tiles=-(-num_tokens // tile_tokens),
    )


def cut_segments(nodes: Nodes, tiling: NodeTiling, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the nodes' keys so that all programs have work; returns (node, kv begin, kv end) of segments."""
    kv_lens = nodes.kv_end - nodes.kv_begin
    limits = np.zeros_like(kv_lens)
    for is_thin, programs in ((True, tiling.thin_programs), (False, tiling.fat_programs)):
        chosen = nodes.is_thin == is_thin
        limits[chosen] = _segment_len(nodes, chosen, programs, tiling, costs)
    align = tiling.align_tokens
    num_segments = -(-kv_lens // limits)
    segment_lens = -(-kv_lens // (num_segments * align)) * align
    node, index = expand(-(-kv_lens // segment_lens))
    begin = nodes.kv_begin[node] + index * segment_lens[node]
    return node, begin, np.minimum(begin + segment_lens[node], nodes.kv_end[node])


def _segment_len(
    nodes: Nodes, chosen: np.ndarray, num_programs: int, tiling: NodeTiling, costs: Costs
) -> int:
    """Choose the longest segment for a class of nodes: balance against the number of partial results."""
    kv_lens, num_tiles = (nodes.kv_end - nodes.kv_begin)[chosen], nodes.num_tiles[chosen]
    longest = int(kv_lens.max(initial=1))
    most = max(1, min(_MAX_SEGMENTS, longest // tiling.min_segment_tokens))
    # The longest node in one segment, in two, ...; below, one row for each.
    limits = -(-longest // (np.arange(1, most + 1) * tiling.align_tokens)) * tiling.align_tokens
    num_segments = -(-kv_lens // limits[:, None])
    num_items = num_segments @ num_tiles * tiling.num_kv_heads
    num_partials = num_segments @ nodes.num_tokens[chosen]
    # Keys that the busiest program reads for its head, with its share of the partial results.
    keys = -(-num_items // num_programs) * (limits + tiling.align_tokens)
    partials = costs.partial_tokens * num_partials * tiling.num_kv_heads / num_programs
    return int(limits[np.argmin(keys + partials)])


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (owner, index): each owner repeated counts[owner] times, numbered from 0."""
    owner = np.repeat(np.arange(counts.shape[0]), counts)
    return owner, np.arange(owner.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
