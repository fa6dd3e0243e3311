"""Cut the shared prefixes that a GPU reads once for all of their sequences into units of work.

NumPy only. A plan changes only when sequences join or leave: shared blocks are full, so decoding only makes
leaves longer. The device lists the leaves in each step (triton/step_map.py).

The example of prefix_forest.py; sequences A .. F have one query token each, tokens 0 .. 5:

    nodes                      what the plan holds
    node 0  C E    blocks 8 9  tokens       C E | D A F           query tokens of each unit, by their row of q
    node 1  D A F  blocks 1 2  partial_ids  1 3 | 2 0 4           where each one's partial result goes
                               merge_begin  0 1 1 2 3 4 5         A has partial result 0, B none, C 1, ...
                               leaf_begin   32 0 32 32 32 32      tokens of A, B, C, ... that nodes cover
                               block_ids    8 9 | 1 2

    unit (one segment a node)  block ids from   first entry, tokens   keys
    node 0                     0                0, 2                  0 : 32
    node 1                     2                2, 3                  0 : 32
"""

from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from octavo.attention.lengths import concatenated_ranges, cumulative, expand
from octavo.attention.plan.node_segments import NodeTiling, cut_segments, gather_nodes
from octavo.attention.plan.prefix_forest import (
    Costs,
    SharedPrefixes,
    Sharing,
)
from octavo.attention.plan.window_forest import find_prefixes
from octavo.errors import InvalidArgumentError

# Fields of a unit's record, see triton/step_map.py.
_RECORD = 8


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
    """Work over the shared nodes of a step, without the leaves: the sequences' own parts.

        sequence A   [ node 0: segment, segment ][ node 1 ][ leaf ...
        sequence B   [           same           ][  same  ][ leaf ...
        sequence C   [           same           ][ leaf ...

    A unit is a tile of a node's query tokens and a segment of its keys. Every token of a unit sees every
    key of it, unless there is a window. Each (segment, token) gives one partial result; those of token t,
    from the root down, are merge_begin[t] : merge_begin[t + 1].

    Attributes:
        thin_units, fat_units: [U, 8] int32 records, by decreasing work: 0 entry of block_ids where block 0
            of the sequence would be (may be negative), 1 first entry of tokens and partial_ids, 2 number of
            tokens, 3 first key, 4 end of the keys, 5 and 6 repeat 3 and 4: every token sees every key. 7
            repeats 3, which layers with a window change in each step; see triton/window_nodes.py.
        tokens: [P] int32, query tokens (rows of q).
        partial_ids: [P] int32, number of each entry's partial result.
        merge_begin: [T + 1] int32.
        leaf_begin: [S] int32, tokens of each sequence that nodes cover.
        block_ids: [N] int32, the nodes' blocks: copies, since a member's table row may be reused.
        sharing: how many nodes there are and what they save.
    """

    thin_units: np.ndarray
    fat_units: np.ndarray
    tokens: np.ndarray
    partial_ids: np.ndarray
    merge_begin: np.ndarray
    leaf_begin: np.ndarray
    block_ids: np.ndarray
    sharing: Sharing

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
        window: int | None = None,
    ) -> "NodePlan":
        """Find the shared prefixes and cut them into units; arrays as for ForestPlan.from_block_tables.

        Args:
            tiling: of the kernels.
            costs: of reads and partial results.
            capacity: limits of the plan, or None. Nodes that save the least are dropped until it fits.
            min_saved_tokens: a plan that saves fewer is empty: launching its kernels would cost more.
            window: of the layers; None: they have none.

        Raises:
            InvalidArgumentError: the step has more tokens or sequences than the capacity.
        """
        seq_lens = np.asarray(seq_lens, dtype=np.int64)
        cu_seqlens_q = np.asarray(cu_seqlens_q, dtype=np.int64)
        if capacity is not None:
            _check_step(seq_lens.shape[0], int(cu_seqlens_q[-1]), capacity)
        query_lens = np.diff(cu_seqlens_q)
        align_blocks = lcm(block_size, tiling.align_tokens) // block_size
        while True:
            shared = find_prefixes(
                block_tables, seq_lens, query_lens, block_size, costs, align_blocks, window
            )
            if shared.sharing(block_size).saved_tokens < min_saved_tokens:
                shared = SharedPrefixes.none()
            plan = _cut(shared, block_tables, cu_seqlens_q, block_size, tiling, costs)
            if capacity is None or plan.fits(capacity):
                return plan
            # The plan is too large: try again with longer segments and fewer nodes.
            costs = replace(
                costs,
                partial_tokens=4 * costs.partial_tokens + 1,
                node_tokens=2 * costs.node_tokens + block_size,
            )

    @property
    def num_units(self) -> int:
        """Units of both classes; 0: sharing saves nothing, so attend without the plan."""
        return self.thin_units.shape[0] + self.fat_units.shape[0]

    @property
    def num_partials(self) -> int:
        """Total number of partial results."""
        return self.tokens.shape[0]

    def fits(self, capacity: NodeCapacity) -> bool:
        """Return whether the plan is within a capacity."""
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


def _cut(
    shared: SharedPrefixes,
    block_tables: np.ndarray,
    cu_seqlens_q: np.ndarray,
    block_size: int,
    tiling: NodeTiling,
    costs: Costs,
) -> NodePlan:
    nodes = gather_nodes(shared, cu_seqlens_q, block_size, tiling)
    leaf_begin = shared.leaf_begin(cu_seqlens_q.shape[0] - 1, block_size).astype(np.int32)
    node, kv_begin, kv_end = cut_segments(nodes, tiling, costs)
    num_tokens = nodes.num_tokens[node]
    tokens = nodes.pool[concatenated_ranges(nodes.token_begin[node], num_tokens)]
    first_entry = np.cumsum(num_tokens) - num_tokens
    block_ids, first_block = _block_ids(shared, block_tables)
    segment, tile = expand(nodes.num_tiles[node])
    done = tile * nodes.tile_tokens[node[segment]]
    units = np.zeros((segment.shape[0], _RECORD), dtype=np.int32)
    units[:, 0] = first_block[node[segment]]
    units[:, 1] = first_entry[segment] + done
    units[:, 2] = np.minimum(nodes.tile_tokens[node[segment]], num_tokens[segment] - done)
    units[:, 3] = units[:, 5] = units[:, 7] = kv_begin[segment]
    units[:, 4] = units[:, 6] = kv_end[segment]
    by_work = np.argsort(units[:, 3] - units[:, 4], kind="stable")
    units, is_thin = units[by_work], nodes.is_thin[node[segment]][by_work]
    partial_ids, merge_begin = _number_partials(tokens, int(cu_seqlens_q[-1]))
    return NodePlan(
        thin_units=units[is_thin],
        fat_units=units[~is_thin],
        tokens=tokens.astype(np.int32),
        partial_ids=partial_ids,
        merge_begin=merge_begin,
        leaf_begin=leaf_begin,
        block_ids=block_ids,
        sharing=shared.sharing(block_size),
    )


def _block_ids(shared: SharedPrefixes, block_tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copy the nodes' block ids; return (block_ids, where block 0 of each node's sequences would be)."""
    lengths = shared.block_end - shared.block_begin
    node, index = expand(lengths)
    ids = block_tables[shared.rows[shared.first[node]], shared.block_begin[node] + index]
    return ids.astype(np.int32), np.cumsum(lengths) - lengths - shared.block_begin


def _number_partials(tokens: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the partial results token by token, root first."""
    partial_ids = np.empty(tokens.shape[0], dtype=np.int32)
    partial_ids[np.argsort(tokens, kind="stable")] = np.arange(tokens.shape[0])
    merge_begin = cumulative(np.bincount(tokens, minlength=num_tokens))
    return partial_ids, merge_begin.astype(np.int32)
