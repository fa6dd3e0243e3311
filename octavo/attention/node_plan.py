"""Which shared runs of blocks a GPU reads once for all of their sequences, and how that work is cut.

NumPy only. A plan changes only when sequences join or leave: shared blocks are full blocks, so while
sequences decode, only their own parts grow, and those the device plans by itself.
"""

from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from octavo.attention.forest import concatenated_ranges
from octavo.attention.prefix_forest import Costs, SharedPrefixes, find_shared_prefixes
from octavo.errors import InvalidArgumentError

# Fields of a unit's record; the first seven are those of a step's own units, see triton_plan.
_RECORD = 8
# A node with few tokens is read by so many thin tiles before a fat one is cheaper.
_MAX_THIN_TILES = 2
# Segments of a node that are tried.
_MAX_SEGMENTS = 64
# Tokens that a sequence is taken to grow by while a plan lasts.
_GROWTH = 32


@dataclass(frozen=True, slots=True)
class NodeTiling:
    """How a kernel wants nodes to be cut; a thin tile has few query tokens, a fat one many.

    Attributes:
        thin_tokens, fat_tokens: query tokens of a tile.
        thin_programs, fat_programs: programs that run side by side.
        num_kv_heads: KH; a program works for one at a time.
        align_tokens: nodes and their segments begin and end at multiples of this many keys.
        min_segment_tokens: shorter segments are not made of long ones.
        reads_per_fat_key: keys and values of one head that the GPU reads while one program attends to one key
            of a fat tile, where the two go on side by side; 0 where they follow one another.
    """

    thin_tokens: int
    fat_tokens: int
    thin_programs: int
    fat_programs: int
    num_kv_heads: int
    align_tokens: int = 64
    min_segment_tokens: int = 256
    reads_per_fat_key: int = 0


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The most that a plan may hold.

    Attributes:
        num_tokens: query tokens of the step.
        num_sequences: sequences of the step.
        num_units: units of each class.
        num_partials: partial results.
        num_blocks: blocks of all nodes.
    """

    num_tokens: int
    num_sequences: int
    num_units: int
    num_partials: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Work over the shared nodes of a step; each sequence's own part, its leaf, is not in it.

        sequence A   [ node 0: segment, segment ][ node 1 ][ leaf ...
        sequence B   [           same           ][  same  ][ leaf ...
        sequence C   [           same           ][ leaf ...

    A unit is a tile of a node's query tokens and a segment of its keys. Every token of a unit sees every
    key of it. Each (segment, token) gives one partial result; a token's partials, from the root down, are
    the slots merge_begin[t] : merge_begin[t + 1].

    Attributes:
        thin_units, fat_units: [U, 8] int32 records, by falling work: 0 entry of block_ids that block 0 of
            the sequence would have (may be negative), 1 first entry of tokens and slots, 2 number of
            tokens, 3 first key, 4 end of the keys, 5 and 6 the same again: every token sees every key.
        tokens: [P] int32, query tokens (rows of q).
        slots: [P] int32, slot of each one's partial result.
        merge_begin: [T + 1] int32.
        leaf_begin: [S] int32, tokens of each sequence that nodes cover.
        block_ids: [N] int32, the nodes' blocks: copies, since a member's table row may be reused.
        kv_tokens_saved: tokens of KV not read because nodes are shared.
        num_fat_programs: how many programs share the fat units.
    """

    thin_units: np.ndarray
    fat_units: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray
    merge_begin: np.ndarray
    leaf_begin: np.ndarray
    block_ids: np.ndarray
    kv_tokens_saved: int
    num_fat_programs: int

    @classmethod
    def from_block_tables(
        cls,
        block_tables: np.ndarray,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        block_size: int,
        *,
        tiling: NodeTiling,
        costs: Costs,
        capacity: NodeCapacity | None = None,
        min_saved_tokens: int = 0,
    ) -> "NodePlan":
        """Find the shared runs of blocks and cut them into units.

        Only blocks wholly before every member's first query token are shared.

        Args:
            block_tables: [S, max_blocks] int32; entries past a sequence's last block are never read.
            seq_lens: [S] int32, tokens in the cache, the query tokens included; 0 for an empty row.
            cu_seqlens_q: [S + 1] int32, cumulative query lengths.
            block_size: tokens in a block.
            tiling: how the kernel wants it.
            costs: what sharing saves and costs.
            capacity: what the plan must fit; the least valuable nodes are given up for it.
            min_saved_tokens: a plan that saves fewer is empty: the kernels' launches cost more.

        Raises:
            InvalidArgumentError: the step has more tokens or sequences than the capacity.
        """
        seq_lens = np.asarray(seq_lens, dtype=np.int64)
        cu_seqlens_q = np.asarray(cu_seqlens_q, dtype=np.int64)
        if capacity is not None:
            _check_step(seq_lens.shape[0], int(cu_seqlens_q[-1]), capacity)
        query_lens = np.diff(cu_seqlens_q)
        num_shareable = np.where(query_lens > 0, np.maximum(seq_lens - query_lens, 0) // block_size, 0)
        align_blocks = lcm(block_size, tiling.align_tokens) // block_size
        while True:
            shared = find_shared_prefixes(
                block_tables, num_shareable, query_lens, block_size, costs, align_blocks
            )
            if _saved_tokens(shared, block_size) < min_saved_tokens:
                shared = SharedPrefixes.none()
            plan = _cut(shared, block_tables, seq_lens, cu_seqlens_q, block_size, tiling, costs)
            if capacity is None or plan.fits(capacity):
                return plan
            # Longer segments first of all, and fewer nodes.
            costs = replace(
                costs,
                partial_tokens=4 * costs.partial_tokens + 1,
                node_tokens=2 * costs.node_tokens + block_size,
            )

    @property
    def num_units(self) -> int:
        """Units of both classes; 0: nothing is shared, and attention without the plan is faster."""
        return self.thin_units.shape[0] + self.fat_units.shape[0]

    @property
    def num_partials(self) -> int:
        """Slots in all."""
        return self.tokens.shape[0]

    def fits(self, capacity: NodeCapacity) -> bool:
        """Say whether the plan is within a capacity."""
        return (
            max(self.thin_units.shape[0], self.fat_units.shape[0]) <= capacity.num_units
            and self.num_partials <= capacity.num_partials
            and self.block_ids.shape[0] <= capacity.num_blocks
            and self.merge_begin.shape[0] - 1 <= capacity.num_tokens
            and self.leaf_begin.shape[0] <= capacity.num_sequences
        )


def _check_step(num_sequences: int, num_tokens: int, capacity: NodeCapacity) -> None:
    if num_sequences > capacity.num_sequences or num_tokens > capacity.num_tokens:
        raise InvalidArgumentError(
            f"a step of {num_sequences} sequences and {num_tokens} query tokens does not fit a forest made "
            f"for {capacity.num_sequences} and {capacity.num_tokens}; make a larger one"
        )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Shared nodes, parents first; node i's query tokens are pool[token_begin[i] :][: num_tokens[i]]."""

    kv_begin: np.ndarray
    kv_end: np.ndarray
    pool: np.ndarray
    token_begin: np.ndarray
    num_tokens: np.ndarray
    is_thin: np.ndarray
    tile_tokens: np.ndarray
    num_tiles: np.ndarray


def _cut(
    shared: SharedPrefixes,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    block_size: int,
    tiling: NodeTiling,
    costs: Costs,
) -> NodePlan:
    nodes = _nodes(shared, cu_seqlens_q, block_size, tiling)
    leaf_begin = _leaf_begin(shared, cu_seqlens_q.shape[0] - 1, block_size)
    own_tokens = 0
    if np.diff(cu_seqlens_q).max(initial=0) <= tiling.thin_tokens:
        own_tokens = int(np.where(seq_lens > 0, seq_lens - leaf_begin + _GROWTH, 0).sum())
    node, kv_begin, kv_end = _segments(nodes, tiling, costs, own_tokens)
    num_tokens = nodes.num_tokens[node]
    tokens = nodes.pool[concatenated_ranges(nodes.token_begin[node], num_tokens)]
    first_entry = np.cumsum(num_tokens) - num_tokens
    block_ids, first_block = _block_ids(shared, block_tables)
    segment, tile = _expand(nodes.num_tiles[node])
    done = tile * nodes.tile_tokens[node[segment]]
    units = np.zeros((segment.shape[0], _RECORD), dtype=np.int32)
    units[:, 0] = first_block[node[segment]]
    units[:, 1] = first_entry[segment] + done
    units[:, 2] = np.minimum(nodes.tile_tokens[node[segment]], num_tokens[segment] - done)
    units[:, 3] = units[:, 5] = kv_begin[segment]
    units[:, 4] = units[:, 6] = kv_end[segment]
    by_falling_work = np.argsort(units[:, 3] - units[:, 4], kind="stable")
    units, is_thin = units[by_falling_work], nodes.is_thin[node[segment]][by_falling_work]
    slots, merge_begin = _slots(tokens, int(cu_seqlens_q[-1]))
    return NodePlan(
        thin_units=units[is_thin],
        fat_units=units[~is_thin],
        tokens=tokens.astype(np.int32),
        slots=slots,
        merge_begin=merge_begin,
        leaf_begin=leaf_begin,
        block_ids=block_ids,
        kv_tokens_saved=_saved_tokens(shared, block_size),
        # No more than have work: what they leave free is for what goes on beside them.
        num_fat_programs=max(1, min(tiling.fat_programs, int((~is_thin).sum()) * tiling.num_kv_heads)),
    )


def _saved_tokens(shared: SharedPrefixes, block_size: int) -> int:
    num_blocks = (shared.last - shared.first) * (shared.block_end - shared.block_begin)
    return int(num_blocks.sum()) * block_size


def _nodes(shared: SharedPrefixes, cu_seqlens_q: np.ndarray, block_size: int, tiling: NodeTiling) -> _Nodes:
    query_lens = np.diff(cu_seqlens_q)[shared.rows]
    bounds = np.concatenate([[0], np.cumsum(query_lens)])
    num_tokens = bounds[shared.last + 1] - bounds[shared.first]
    is_thin = num_tokens <= _MAX_THIN_TILES * tiling.thin_tokens
    tile_tokens = np.where(is_thin, tiling.thin_tokens, tiling.fat_tokens)
    return _Nodes(
        kv_begin=shared.block_begin * block_size,
        kv_end=shared.block_end * block_size,
        pool=concatenated_ranges(cu_seqlens_q[shared.rows], query_lens),
        token_begin=bounds[shared.first],
        num_tokens=num_tokens,
        is_thin=is_thin,
        tile_tokens=tile_tokens,
        num_tiles=-(-num_tokens // tile_tokens),
    )


def _segments(
    nodes: _Nodes, tiling: NodeTiling, costs: Costs, own_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the nodes' keys so that all programs have work; returns (node, kv begin, kv end) of segments.

    Fat units that run beside the reading of thin ones and of the sequences' own tokens need not be faster
    than that, and longer segments give fewer partial results.
    """
    kv_lens = nodes.kv_end - nodes.kv_begin
    spare_keys = 0
    if tiling.reads_per_fat_key:
        thin_tokens = int((kv_lens * nodes.num_tiles)[nodes.is_thin].sum())
        spare_keys = (own_tokens + thin_tokens) * tiling.num_kv_heads // tiling.reads_per_fat_key
    limits = np.zeros_like(kv_lens)
    for is_thin, programs, spare in (
        (True, tiling.thin_programs, 0),
        (False, tiling.fat_programs, spare_keys),
    ):
        chosen = nodes.is_thin == is_thin
        limits[chosen] = _segment_len(nodes, chosen, programs, tiling, costs, spare)
    align = tiling.align_tokens
    num_segments = -(-kv_lens // limits)
    segment_lens = -(-kv_lens // (num_segments * align)) * align
    node, index = _expand(-(-kv_lens // segment_lens))
    begin = nodes.kv_begin[node] + index * segment_lens[node]
    return node, begin, np.minimum(begin + segment_lens[node], nodes.kv_end[node])


def _segment_len(
    nodes: _Nodes, chosen: np.ndarray, num_programs: int, tiling: NodeTiling, costs: Costs, spare_keys: int
) -> int:
    """Choose the longest segment for a class of nodes: balance against the number of partial results.

    The first spare_keys that the busiest program reads are free.
    """
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
    return int(limits[np.argmin(np.maximum(0, keys - spare_keys) + partials)])


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (owner, index): each owner repeated counts[owner] times, numbered from 0."""
    owner = np.repeat(np.arange(counts.shape[0]), counts)
    return owner, np.arange(owner.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)


def _block_ids(shared: SharedPrefixes, block_tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copy the nodes' block ids; returns (block_ids, where block 0 of each node's sequences would be)."""
    lengths = shared.block_end - shared.block_begin
    node, index = _expand(lengths)
    ids = block_tables[shared.rows[shared.first[node]], shared.block_begin[node] + index]
    return ids.astype(np.int32), np.cumsum(lengths) - lengths - shared.block_begin


def _leaf_begin(shared: SharedPrefixes, num_sequences: int, block_size: int) -> np.ndarray:
    leaf_begin = np.zeros(num_sequences, dtype=np.int32)
    for first, last, end in zip(shared.first, shared.last, shared.block_end, strict=True):
        leaf_begin[shared.rows[first : last + 1]] = end * block_size
    return leaf_begin


def _slots(tokens: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the partials token by token, each token's from the root down."""
    slots = np.empty(tokens.shape[0], dtype=np.int32)
    slots[np.argsort(tokens, kind="stable")] = np.arange(tokens.shape[0])
    merge_begin = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=num_tokens))])
    return slots, merge_begin.astype(np.int32)
