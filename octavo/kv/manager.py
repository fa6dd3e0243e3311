"""KVCacheManager: which sequences hold and share which blocks, and which cached blocks are evicted."""

from collections.abc import Sequence
from numbers import Integral

from octavo.errors import InvalidArgumentError
from octavo.kv.block_store import BlockStore
from octavo.kv.cache_layers import CacheLayer
from octavo.kv.cache_layout import CacheLayout, plan_layout
from octavo.kv.cache_stats import KVStats
from octavo.kv.invariants import check_pool, check_prefixes, check_sequences
from octavo.kv.sequence_blocks import BlockHash, SequenceBlocks, WindowBlocks, hash_block
from octavo.kv.slots import num_blocks_for


class KVCacheManager:
    """Block bookkeeping of one KV cache. Layers that keep the same form a group, and use the same ids.

                  allocate             publish or commit             free, hide (ref 0)
        FREE ----------------> PARTIAL ----------------> REGISTERED ----------------> CACHED
         ^                        | free, hide               ^   match_prefix: ref + 1   |
         +------------------------+--------------- evict ----+---------------------------+

    The order of calls for one sequence: new_sequence, match_prefix; then in each step hide (what no token
    sees any more, in layers with windows), allocate, publish (before the tokens are computed, so that others
    can share them already) and commit (after); finally free. A freed sequence is empty and may start over.
    Not thread-safe.

    All groups take pages from one pool (see cache_layout). A prefix is hit as far as the first group has all
    of it, and each other group what the next token sees. A windowed block that is evicted takes no other
    with it.

    Published blocks can be hit before they are computed. So steps must run in the order in which they
    publish, and each must store all of its keys and values before it reads any. If a step fails, call
    `reset`: the blocks that it published hold garbage.

    Every method that takes token ids raises InvalidArgumentError if they differ from those of earlier calls,
    or if there are fewer than the number of tokens.

    Args:
        num_blocks: pages of the cache: without a layout, blocks.
        block_size: tokens per block; any size >= 1.
        layout: groups of layers; None: all layers keep all keys, in heads of one shape.
        enable_prefix_caching: False: nothing is hashed, matched or kept.
        bytes_per_block: of one page, for `stats`.
        max_kept_blocks: most cached blocks that are evicted last, because their sequences asked for it.
        hash_block: digest of (parent digest, contents). Collisions cost reuse, never correctness.

    Attributes:
        store: the blocks, for observers; `reset` replaces it.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layout: CacheLayout | None = None,
        enable_prefix_caching: bool = True,
        bytes_per_block: int = 0,
        max_kept_blocks: int = 0,
        hash_block: BlockHash = hash_block,
    ) -> None:
        numbers = (num_blocks, block_size, bytes_per_block, max_kept_blocks)
        in_range = all(isinstance(number, Integral) for number in numbers) and min(numbers[:2]) >= 1
        if not in_range or min(numbers) < 0:
            raise InvalidArgumentError(
                f"expected integers num_blocks >= 1, block_size >= 1, bytes_per_block >= 0 and "
                f"max_kept_blocks >= 0, got {', '.join(map(repr, numbers))}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout or plan_layout((CacheLayer(1, 1),), block_size, block_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.bytes_per_block = bytes_per_block
        self._hash_block = hash_block
        self._max_kept = max_kept_blocks
        self._per_page = self.layout.groups[0].blocks_per_page
        self.store = BlockStore(num_blocks, self.layout, max_kept=max_kept_blocks)
        self._live: set[SequenceBlocks] = set()
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._num_lost_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        """Pages that `allocate` can hand out: free ones and cached ones nobody references."""
        return self.store.pool.num_available

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that an otherwise empty pool can hold."""
        return self.layout.num_tokens(self.num_blocks)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether an otherwise empty pool can hold `num_tokens` tokens, computed block by block."""
        return self.layout.num_pages(num_tokens) <= self.num_blocks

    def new_sequence(self, salt: bytes = b"", *, is_kept: bool = False) -> SequenceBlocks:
        """Make an empty sequence; only sequences with equal salts share blocks.

        Args:
            salt: its namespace.
            is_kept: once they are cached, its blocks are evicted after those of others, within
                `max_kept_blocks`.
        """
        if not isinstance(salt, bytes):
            raise InvalidArgumentError(f"salt must be bytes, got {salt!r}")
        windows = tuple(map(WindowBlocks, self.layout.windows))
        return SequenceBlocks(self.block_size, salt, self._hash_block, is_kept, windows=windows)

    def match_prefix(self, sequence: SequenceBlocks, token_ids: Sequence[int], max_tokens: int) -> int:
        """Attach to an empty sequence the longest run of registered blocks that equals its tokens.

        Args:
            sequence: an empty sequence.
            token_ids: its tokens.
            max_tokens: cover at most this many. Pass len(token_ids) - 1 or less, to leave a token to compute.

        Returns:
            Tokens covered: a multiple of the block size; 0 with prefix caching off.

        Raises:
            InvalidArgumentError: the sequence is not empty.
        """
        sequence.require_empty()
        num_blocks = sequence.num_full_blocks(token_ids, max_tokens)
        if not self.enable_prefix_caching:
            return 0
        num_lost = self.store.match(sequence, token_ids, num_blocks)
        self._live.add(sequence)
        num_tokens = sequence.num_filled_tokens
        self._num_query_tokens += max(0, max_tokens)
        self._num_hit_tokens += num_tokens
        self._num_lost_tokens += num_lost * self.block_size
        return num_tokens

    def hide(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Give back the blocks of windowed layers that no token behind the first `num_tokens` sees.

        A fork or a cut keeps possible at `num_tokens`, not before. Steps in flight may still read the blocks:
        a step that writes them must run after those.
        """
        if sequence.windows:
            self.store.hide(sequence, num_tokens)

    def allocate(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Grow a sequence so that its first `num_tokens` tokens fit, evicting cached blocks as needed.

        Never shrinks. The new slots count as unfilled until they are published or committed.

        Returns:
            False when there are too few blocks now; then nothing changed.
        """
        if not sequence.windows and num_tokens <= len(sequence.block_ids) * self.block_size:
            # Most decoding steps end here.
            self._require_ours(sequence)
            return True
        return self.allocate_part(sequence, num_tokens, num_tokens) >= num_tokens

    def allocate_part(
        self, sequence: SequenceBlocks, num_tokens: int, end: int, start: int | None = None
    ) -> int:
        """Grow a sequence as `allocate` does, but its windows only for the first `end` of the tokens.

        So a long prompt takes no more blocks of windowed layers at a time than its next step needs.

        Args:
            sequence: the sequence.
            num_tokens: of all layers that keep all keys.
            end: of the others.
            start: accept as many tokens of the others as fit now, if they are more than this; None: take
                all or nothing.

        Returns:
            Tokens that fit all layers now: `end` or more, with a start maybe fewer; -1 when there are too few
            blocks: then nothing changed.
        """
        self._require_ours(sequence)
        size, per_page = self.block_size, self._per_page
        num_blocks = max(0, num_blocks_for(num_tokens, size) - len(sequence.block_ids))
        num_first = num_blocks if per_page == 1 else num_blocks_for(num_blocks, per_page)
        num_others = 0
        if windows := sequence.windows:
            num_held = len(windows[0].block_ids)
            num_others = max(0, num_blocks_for(end, size) - num_held)
            num_fit = (self.store.pool.num_available - num_first) // len(windows)
            if start is not None and 0 <= num_fit < num_others and (num_held + num_fit) * size > start:
                num_others, end = num_fit, (num_held + num_fit) * size
        num_pages = num_first + num_others * len(windows)
        if num_pages == 0:
            return end
        pages = self.store.take(num_pages)
        if pages is None:
            return -1
        sequence.block_ids.extend(self.store.block_ids(pages[:num_first]))
        for group, window in enumerate(windows, start=1):
            begin = num_first + (group - 1) * num_others
            window.block_ids.extend(self.store.block_ids(pages[begin : begin + num_others], group))
        self._live.add(sequence)
        return end

    def publish(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> None:
        """Register the full blocks of the first `num_tokens` tokens, which the next step computes.

        Stops before a block that is registered already, or whose digest collides with another's: the step
        will write to this sequence's own block, which `commit` may exchange afterwards.

        Raises:
            InvalidArgumentError: the tokens do not fit the blocks.
        """
        num_full = self._num_full_blocks(sequence, token_ids, num_tokens)
        if self.enable_prefix_caching:
            self.store.register(sequence, token_ids, num_full, exchange=False)
            num_registered = sequence.num_committed * self.block_size
            sequence.num_filled_tokens = max(sequence.num_filled_tokens, num_registered)

    def commit(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed_tokens: int) -> bool:
        """Declare that the first `num_computed_tokens` tokens are in the cache; register their full blocks.

        If an equal block is registered already, the sequence is repointed to it and its own copy released.
        With prefix caching off, only num_committed and num_filled_tokens advance. A block whose digest
        collides with a different block's stays private, and so do the blocks after it.

        Returns:
            True when `block_ids` changed.

        Raises:
            InvalidArgumentError: the tokens do not fit the blocks.
        """
        if sequence.grows_in_its_last_block(num_computed_tokens) and num_computed_tokens <= len(token_ids):
            # Nearly every decoding step ends here.
            sequence.num_filled_tokens = num_computed_tokens
            return False
        num_full = self._num_full_blocks(sequence, token_ids, num_computed_tokens)
        changed = False
        if self.enable_prefix_caching:
            changed = self.store.register(sequence, token_ids, num_full, exchange=True)
        else:
            sequence.num_committed = max(sequence.num_committed, num_full)
        sequence.num_filled_tokens = max(sequence.num_filled_tokens, num_computed_tokens)
        return changed

    def fork(
        self, parent: SequenceBlocks, num_tokens: int
    ) -> tuple[SequenceBlocks, list[tuple[int, int]]] | None:
        """Make a sequence that holds the parent's first `num_tokens` tokens.

        Full blocks are shared. A partly filled last block is copied, because both will write to it.

        Returns:
            The child and the copies of pages (source, destination) to make before anything is written: one
            for each group, or none. None when there is no free page for a copy; then nothing changed.

        Raises:
            InvalidArgumentError: the parent does not have that many tokens in the cache, or it gave back what
                the next token sees.
        """
        self._require_ours(parent)
        if not 0 <= num_tokens <= parent.num_filled_tokens:
            raise InvalidArgumentError(
                f"a fork takes 0 .. {parent.num_filled_tokens} tokens (those the parent has in the cache), "
                f"got {num_tokens}; commit computed tokens first"
            )
        if not parent.sees_window(num_tokens):
            raise InvalidArgumentError(
                f"layers with windows gave back what token {num_tokens} sees; fork before `hide`"
            )
        num_full, num_in_tail = divmod(num_tokens, self.block_size)
        tails = self.store.take(len(self.layout.groups)) if num_in_tail else []
        if tails is None:
            return None
        child = self.new_sequence(parent.salt, is_kept=parent.is_kept)
        child.block_keys = parent.block_keys[:num_full]
        child.num_committed = min(parent.num_committed, num_full)
        child.num_filled_tokens = num_tokens
        child.branches = parent.branches
        self._live.add(child)
        return child, self.store.branch(parent, child, num_full, tails)

    def can_cut(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Return whether `truncate` to `num_tokens`, at most the reach, needs no copy of a block."""
        return sequence.sees_window(num_tokens) and self.store.can_cut(sequence, num_tokens)

    def truncate(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Drop the blocks beyond the first `num_tokens` tokens, and the tokens in them.

        The block that the cut falls into will be written again, so it must be this sequence's alone and not
        registered. Otherwise call ``fork(sequence, num_tokens)``, which copies the block, and free the
        original.

        Raises:
            InvalidArgumentError: the cut falls inside a shared or registered block, or beyond the blocks;
                then nothing changed.
        """
        self._require_ours(sequence)
        sequence.require_reach(num_tokens)
        if not self.can_cut(sequence, num_tokens):
            raise InvalidArgumentError(
                f"cannot cut at {num_tokens} tokens: that is inside a shared or registered block, which must "
                f"not be written again, or behind a window that was given back; cut at a multiple of "
                f"{self.block_size}, or fork and free"
            )
        num_full, num_kept = num_tokens // self.block_size, num_blocks_for(num_tokens, self.block_size)
        if num_kept < len(sequence.block_ids):
            self.store.cut(sequence, num_kept)
        del sequence.block_keys[num_full:]
        sequence.num_filled_tokens = min(sequence.num_filled_tokens, num_tokens)
        sequence.num_committed = min(sequence.num_committed, num_full)

    def free(self, sequence: SequenceBlocks) -> None:
        """Release all blocks, last block first: beginnings of prefixes are evicted last. Idempotent."""
        self._require_ours(sequence)
        # What its end does not see is evicted first.
        self.hide(sequence, sequence.num_filled_tokens)
        pages = self.store.held_pages(sequence)
        if sequence.is_kept:
            self.store.pool.keep(pages)
        self.store.release(pages)
        sequence.clear()
        self._live.discard(sequence)

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks that have no reference; return how many became free.

        Blocks in use stay registered, so a request like a running one can still hit them.
        """
        return self.store.drop_cached()

    def reset(self) -> None:
        """Forget every sequence and every block, in whatever state they are; counters continue.

        Call it after an interrupted operation or a failed step, when the contents of published blocks are
        unknown. Sequences made before must not be used again.
        """
        num_evictions = self.store.num_evictions
        self.store = BlockStore(
            self.num_blocks, self.layout, num_evictions=num_evictions, max_kept=self._max_kept
        )
        self._live = set()

    def stats(self) -> KVStats:
        """Return the pool's figures; O(live sequences)."""
        # Only blocks that belong to one sequence have unfilled slots, so nothing is counted twice.
        keeps_all = bool(self.layout.groups[0].layers)
        unfilled = sum(
            (sequence.capacity if keeps_all else sequence.reach) - sequence.num_filled_tokens
            for sequence in self._live
        )
        pool = self.store.pool
        return KVStats(
            num_blocks=self.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_shared=pool.num_shared,
            num_table_entries=sum(map(self.store.num_held_pages, self._live)),
            reserved_unfilled_tokens=unfilled,
            block_size=self.layout.tokens_per_page if keeps_all else self.block_size,
            prefix_query_tokens=self._num_query_tokens,
            prefix_hit_tokens=self._num_hit_tokens,
            prefix_lost_tokens=self._num_lost_tokens,
            num_evictions=self.store.num_evictions,
            bytes_per_block=self.bytes_per_block,
        )

    def check_invariants(self) -> None:
        """Assert that pool, tree and live sequences agree; O(all blocks), for tests."""
        check_pool(self.store)
        check_sequences(self.store, self._live)
        if self.enable_prefix_caching:
            check_prefixes(self.store.tree, self._live)

    def _num_full_blocks(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> int:
        """Return how many blocks a sequence's first tokens fill, which must be its own and fit."""
        self._require_ours(sequence)
        num_full = sequence.num_full_blocks(token_ids, num_tokens)
        sequence.require_reach(num_tokens)
        return num_full

    def _require_ours(self, sequence: SequenceBlocks) -> None:
        if sequence.block_ids and sequence not in self._live:
            raise InvalidArgumentError("the sequence belongs to another manager; use the one that made it")
