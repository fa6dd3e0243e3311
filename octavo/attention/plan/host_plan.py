"""The work list of one step's attention: which query tokens read which segments of the KV cache.

NumPy only: the host makes the plan once per step, for every layer. The C kernel and torch_paged follow it.

The example of prefix_forest.py; sequences A .. F have one query token each, tokens 0 .. 5:

    item         tokens     partial ids        merge_begin     token   its partial results, root to leaf
    0  node 0    C E        2 6                0 2 2 4 6 8 10  A       0 (node 1), 1 (leaf)
    1  node 1    D A F      4 0 8                              B       none: its only item writes the output
    2  leaf A    A          1                                  C       2 (node 0), 3 (leaf)
    3  leaf B    B          -1                                 D       4 (node 1), 5 (leaf)
    4  leaf C    C          3                                  E       6 (node 0), 7 (leaf)
    ...                                                        F       8 (node 1), 9 (leaf)
"""

from dataclasses import InitVar, dataclass, field
from itertools import accumulate

import numpy as np

from octavo.attention.lengths import (
    Lengths,
    check_capacity,
    check_kv_begin,
    check_lengths,
    concatenated_ranges,
    cumulative,
)
from octavo.attention.plan.host_segments import cut_keys, cut_queries, find_segments
from octavo.attention.plan.prefix_forest import (
    TILE_TOKENS,
    Costs,
    SharedPrefixes,
    Sharing,
)
from octavo.attention.plan.window_forest import check_window, find_prefixes
from octavo.errors import InvalidArgumentError

SPLIT_TOKENS = 512
_MAKER = object()


@dataclass(frozen=True, slots=True)
class ForestPlan:
    """Work items over a forest of shared prefixes; without sharing, one tree per sequence.

    An item is one read of one segment for a tile of query tokens. Each (item, token) pair gives one
    partial result. A token's partials cover its visible keys exactly once and are merged root to leaf.

        item 0   tokens 0 1 2   [shared prefix ]
        item 1   token  0                       [own part of sequence 0]
        item 2   tokens 1 2                     [own part of sequence 1]

    The plan may list keys that a causal or window mask hides: positions still decide what a token sees.

    Kernels trust a plan. So only `flat` and `from_block_tables` can make one, and its arrays are read-only.

    Attributes:
        item_table_row: [I] int32, block-table row through which the segment is read.
        item_kv_begin: [I] int32, first token of the segment in that row's sequence.
        item_kv_end: [I] int32, one past the segment's last token.
        item_token_begin: [I + 1] int32, item i is read by item_tokens[begin[i] : begin[i + 1]].
        item_tokens: [P] int32, query tokens (rows of q).
        item_partial_ids: [P] int32, number of the pair's partial result; -1: it is the token's only one, and
            the item writes its output.
        item_order: [I] int32, items by decreasing work, so that threads finish together.
        merge_begin: [T + 1] int32, token t's partial results are merge_begin[t] : merge_begin[t + 1].
        num_partials: total number of partial results.
        num_sequences: S, rows the block table must have.
        max_kv_len: largest item_kv_end, in tokens.
        lengths: of the planned sequences.
        sharing: how many shared prefixes there are and what they save.
        right: keys after its position that a token may see; None: all.
        window: keys up to its position that a token may see; None: all.
        kv_begin: [S] int32, the first key of each sequence; None: 0.
        packed: [5 I + 2 P + T + 2] int32, the arrays one after the other in the order of the fields.
    """

    item_table_row: np.ndarray
    item_kv_begin: np.ndarray
    item_kv_end: np.ndarray
    item_token_begin: np.ndarray
    item_tokens: np.ndarray
    item_partial_ids: np.ndarray
    item_order: np.ndarray
    merge_begin: np.ndarray
    num_partials: int
    num_sequences: int
    max_kv_len: int
    lengths: Lengths
    sharing: Sharing
    right: int | None = 0
    window: int | None = None
    kv_begin: np.ndarray | None = None
    # The default only serves plans made by hand, so that __post_init__ can refuse them with a clear message.
    packed: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32), repr=False)
    maker: InitVar[object] = None

    def __post_init__(self, maker: object) -> None:
        if maker is not _MAKER:
            raise InvalidArgumentError(
                "expected a ForestPlan made by ForestPlan.flat or ForestPlan.from_block_tables, got one made "
                "by hand or by dataclasses.replace; make a new plan from the step's lengths"
            )

    @classmethod
    def flat(
        cls,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        *,
        tile_tokens: int = TILE_TOKENS,
        split_tokens: int = SPLIT_TOKENS,
        right: int | None = 0,
        window: int | None = None,
        kv_begin: np.ndarray | None = None,
        may_be_short: bool = False,
    ) -> "ForestPlan":
        """Plan a step without sharing; see from_block_tables.

        A sequence's items depend only on its own lengths, not on its neighbours or the number of threads. So
        its result has the same bits in every batch.

        Args:
            window: see from_block_tables.
            kv_begin: [S] integers, not negative: the first key of each sequence; None: 0.
            may_be_short: see check_lengths.
        """
        lengths = check_lengths(seq_lens, cu_seqlens_q, may_be_short=may_be_short)
        first_keys = None if kv_begin is None else check_kv_begin(kv_begin, lengths)
        return _plan(
            lengths,
            SharedPrefixes.none(),
            block_size=1,
            tile_tokens=tile_tokens,
            split_tokens=split_tokens,
            right=right,
            window=window,
            first_keys=first_keys,
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
        right: int | None = 0,
        window: int | None = None,
    ) -> "ForestPlan":
        """Plan a step in which sequences with equal leading block ids read those blocks together.

        Only blocks before every member's first query token are shared, so a shared segment needs no causal
        mask. Sequences may have no query tokens or no cached tokens.

        Args:
            block_tables: [S, max_blocks] int32; entries past a sequence's last block, and before the first
                one that its queries see, are never read.
            seq_lens: [S] int32, tokens in the cache, including the query tokens.
            cu_seqlens_q: [S + 1] int32, cumulative query lengths.
            block_size: tokens in a block.
            costs: of reads and partial results; None: as measured on a CPU.
            split_tokens: long segments with one query tile are cut at multiples of this position.
            right: keys after its position that a token may see, see ScoreOptions; None: all.
            window: of the layers that use the plan, or of the one that sees most; None: one sees all keys.

        Raises:
            InvalidArgumentError: the lengths are invalid, the table does not fit them, or a size is not
                positive.
        """
        costs = Costs() if costs is None else costs
        lengths = check_lengths(seq_lens, cu_seqlens_q)
        _check_tables(block_tables, lengths.seq_lens, block_size)
        shared = find_prefixes(
            block_tables, lengths.seq_lens, lengths.query_lens, block_size, costs, window=window
        )
        return _plan(
            lengths,
            shared,
            block_size=block_size,
            tile_tokens=costs.tile_tokens,
            split_tokens=split_tokens,
            right=right,
            window=window,
            first_keys=None,
        )

    @property
    def num_items(self) -> int:
        return self.item_table_row.shape[0]

    @property
    def num_pairs(self) -> int:
        """Pairs of an item and a token, P."""
        return self.item_tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens the plan covers."""
        return self.merge_begin.shape[0] - 1

    @property
    def kv_tokens_read(self) -> int:
        """Tokens of KV that this plan reads."""
        return int((self.item_kv_end - self.item_kv_begin).sum())


def _check_tables(block_tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> None:
    if block_size < 1:
        raise InvalidArgumentError(f"block_size must be at least 1 token, got {block_size}")
    num_sequences = seq_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != num_sequences or block_tables.dtype != np.int32:
        raise InvalidArgumentError(
            f"block_tables must be [{num_sequences}, max_blocks] int32, one row per seq_lens entry; "
            f"got {list(block_tables.shape)} {block_tables.dtype}"
        )
    check_capacity(int(seq_lens.max(initial=0)), block_size, block_tables)


def _plan(
    lengths: Lengths,
    shared: SharedPrefixes,
    *,
    block_size: int,
    tile_tokens: int,
    split_tokens: int,
    right: int | None,
    window: int | None,
    first_keys: np.ndarray | None,
) -> ForestPlan:
    if min(tile_tokens, split_tokens) < 1:
        raise InvalidArgumentError(
            f"tile_tokens and split_tokens must be at least 1, got {tile_tokens} and {split_tokens}"
        )
    if right is not None and right < 0:
        raise InvalidArgumentError(f"right must be at least 0 tokens, or None for all; got {right}")
    check_window(window)
    segments = find_segments(lengths, shared, block_size, first_keys, window)
    items = cut_keys(cut_queries(segments, tile_tokens, right, window), split_tokens)
    return _assemble(segments.pool, items, lengths, shared.sharing(block_size), right, window, first_keys)


def _assemble(
    pool: np.ndarray,
    items: tuple[np.ndarray, ...],
    lengths: Lengths,
    sharing: Sharing,
    right: int | None,
    window: int | None,
    first_keys: np.ndarray | None,
) -> ForestPlan:
    table_row, kv_begin, kv_end, pool_begin, pool_end = items
    num_item_tokens = pool_end - pool_begin
    tokens = pool[concatenated_ranges(pool_begin, num_item_tokens)]
    partial_ids, merge_begin = _number_partials(tokens, int(lengths.cu_seqlens_q[-1]))
    kv_lens = kv_end - kv_begin
    # The work of an item: its reads dominate for few query tokens, its arithmetic for many.
    order = np.argsort(-kv_lens * (8 + num_item_tokens), kind="stable")
    token_begin = cumulative(num_item_tokens)
    packed, arrays = _pack(
        (table_row, kv_begin, kv_end, token_begin, tokens, partial_ids, order, merge_begin)
    )
    return ForestPlan(
        *arrays,
        num_partials=int(merge_begin[-1]),
        num_sequences=lengths.seq_lens.shape[0],
        max_kv_len=int(kv_end.max(initial=0)),
        lengths=lengths,
        sharing=sharing,
        right=right,
        window=window,
        kv_begin=first_keys,
        packed=packed,
        maker=_MAKER,
    )


def _pack(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Copy arrays one after the other into read-only memory; return it and its parts."""
    packed = np.frombuffer(np.concatenate(arrays, dtype=np.int32, casting="same_kind").tobytes(), np.int32)
    ends = accumulate(array.shape[0] for array in arrays)
    return packed, [packed[end - array.shape[0] : end] for array, end in zip(arrays, ends, strict=True)]


def _number_partials(tokens: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the partial results token by token, root first; a token's only one gets -1."""
    counts = np.bincount(tokens, minlength=num_tokens)
    partial_ids = np.full(tokens.shape[0], -1)
    several = counts > 1
    if several.any():
        by_token = np.argsort(tokens, kind="stable")
        by_token = by_token[several[tokens[by_token]]]
        partial_ids[by_token] = np.arange(by_token.shape[0])
    return partial_ids, cumulative(np.where(several, counts, 0))
