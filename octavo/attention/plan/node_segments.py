"""Cut the shared nodes of a step into segments of keys, so that all programs of a GPU have work. NumPy only.

    node     query tokens          keys                  segments of at most 1024 keys
    0        C E                   0 : 2048              | 0 : 1024 | 1024 : 2048 |
    1        D A F                 0 : 1024              | 0 : 1024 |

    items = segments x query tiles x kv heads = 3 x 1 x 8 = 24 for the programs of one launch
    partial results = 2 + 2 + 3 = 7 for each head

All nodes of a class (thin, fat) share one limit. A shorter one balances the programs better, a longer one
makes fewer partial results: _segment_len tries them all and takes the cheapest.
"""

from dataclasses import dataclass

import numpy as np

from octavo.attention.lengths import concatenated_ranges, cumulative, expand
from octavo.attention.plan.prefix_forest import Costs, SharedPrefixes

# Nodes that need more thin tiles than this are read by fat tiles, which are cheaper then.
_MAX_THIN_TILES = 2
# Maximum segments of a node.
_MAX_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class NodeTiling:
    """Limits for cutting nodes; a thin tile has few query tokens, a fat one many.

    Attributes:
        thin_tokens, fat_tokens: query tokens of a tile; thin_tokens 0: all are fat.
        thin_programs, fat_programs: programs that run concurrently.
        num_kv_heads: KH; a program works on one at a time.
        align_tokens: nodes and their segments begin and end at multiples of this many keys.
        min_segment_tokens: minimum length of a segment.
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
    bounds = cumulative(shared.num_tokens)
    num_tokens = bounds[shared.last + 1] - bounds[shared.first]
    is_thin = num_tokens <= _MAX_THIN_TILES * tiling.thin_tokens
    tile_tokens = np.where(is_thin, tiling.thin_tokens, tiling.fat_tokens)
    return Nodes(
        kv_begin=shared.block_begin * block_size,
        kv_end=shared.block_end * block_size,
        pool=concatenated_ranges(cu_seqlens_q[shared.rows], shared.num_tokens),
        token_begin=bounds[shared.first],
        num_tokens=num_tokens,
        is_thin=is_thin,
        tile_tokens=tile_tokens,
        num_tiles=-(-num_tokens // tile_tokens),
    )


def cut_segments(nodes: Nodes, tiling: NodeTiling, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the nodes' keys so that all programs have work; return (node, kv begin, kv end) of the segments."""
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
    """Choose the maximum keys of a segment: few keys balance the programs, many make few partial results."""
    kv_lens, num_tiles = (nodes.kv_end - nodes.kv_begin)[chosen], nodes.num_tiles[chosen]
    longest = int(kv_lens.max(initial=1))
    most = max(1, min(_MAX_SEGMENTS, longest // tiling.min_segment_tokens))
    # Candidates: the longest node in one segment, in two, and so on. The arrays below have one row for each.
    limits = -(-longest // (np.arange(1, most + 1) * tiling.align_tokens)) * tiling.align_tokens
    num_segments = -(-kv_lens // limits[:, None])
    num_items = num_segments @ num_tiles * tiling.num_kv_heads
    num_partials = num_segments @ nodes.num_tokens[chosen]
    # Cost: the keys that the busiest program reads, and its share of the partial results.
    keys = -(-num_items // num_programs) * (limits + tiling.align_tokens)
    partials = costs.partial_tokens * num_partials * tiling.num_kv_heads / num_programs
    return int(limits[np.argmin(keys + partials)])
