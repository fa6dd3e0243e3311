"""Block pool and prefix tree, kept in step: an unreferenced block is cached while it is registered."""

from collections.abc import Iterable, Sequence

from octavo.kv.block_pool import BlockPool
from octavo.kv.prefix_tree import ROOT, PrefixTree
from octavo.kv.sequence_blocks import SequenceBlocks


class BlockStore:
    """Hands out, shares, registers and evicts blocks.

    Attributes:
        pool: reference counts.
        tree: blocks that can be hit.
        num_evictions: registered blocks lost to allocations so far.
    """

    def __init__(self, num_blocks: int, *, num_evictions: int = 0, max_kept: int = 0) -> None:
        self.pool = BlockPool(num_blocks, max_kept)
        self.tree = PrefixTree()
        self.num_evictions = num_evictions
        # The sequence that was matched last.
        self._newest: SequenceBlocks | None = None

    def take(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks for writing, evicting cached ones as needed; None changes nothing."""
        block_ids = self.pool.allocate(num_blocks)
        for block_id in block_ids or ():
            if block_id in self.tree:
                self.num_evictions += self._unregister(block_id)
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        self.pool.retain_all(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block, last block first: beginnings of prefixes are evicted last."""
        self.pool.release_all(reversed(block_ids), cached=self.tree)

    def match(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_blocks: int) -> None:
        """Attach to an empty sequence the longest run of registered blocks that equals its tokens.

        Args:
            sequence: an empty sequence.
            token_ids: its tokens.
            num_blocks: attach at most this many.

        Raises:
            InvalidArgumentError: the tokens differ from those that the sequence's keys were made of.
        """
        sequence.require_unchanged(token_ids, 0, num_blocks)
        known = self._known_blocks(sequence, token_ids, num_blocks)
        block_ids = self.tree.longest_match(sequence.keys(token_ids, len(known), num_blocks), known)
        self.retain(block_ids)
        if block_ids:
            self.tree.note_hit(block_ids[-1])
        sequence.block_ids = block_ids
        sequence.num_filled_tokens = len(block_ids) * sequence.block_size
        sequence.num_committed = len(block_ids)
        self._newest = sequence

    def register(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_full: int, *, exchange: bool
    ) -> bool:
        """Register a sequence's blocks up to `num_full`, which are full.

        Where an equal block is registered already, the sequence takes that one and releases its own, or with
        `exchange` off stops there. Stops before a block whose digest collides with a different block's.

        Returns:
            True when the sequence's block ids changed (and are another list).

        Raises:
            InvalidArgumentError: the tokens differ from those that the sequence's keys were made of.
        """
        sequence.require_unchanged(token_ids, sequence.num_committed, num_full)
        sequence.extend_keys(token_ids, num_full)
        block_ids = sequence.block_ids
        for index in range(sequence.num_committed, num_full):
            parent_id = block_ids[index - 1] if index else ROOT
            own_id = block_ids[index]
            block_id = self.tree.find_or_insert(own_id, parent_id, sequence.block_keys[index])
            if block_id is None or (block_id != own_id and not exchange):
                break
            if block_id != own_id:
                if block_ids is sequence.block_ids:
                    block_ids = block_ids.copy()
                block_ids[index] = block_id
                self.pool.retain(block_id)
                self.release([own_id])
            sequence.num_committed = index + 1
        changed = block_ids is not sequence.block_ids
        sequence.block_ids = block_ids
        return changed

    def is_writable(self, block_id: int) -> bool:
        """Return whether only one sequence has the block and no other can find it."""
        return self.pool.ref_counts[block_id] == 1 and block_id not in self.tree

    def drop_cached(self) -> int:
        """Unregister every unreferenced block; returns how many became free."""
        num_free = self.pool.num_free
        for block_id in self.pool.cached_ids:
            if block_id in self.tree:
                self._unregister(block_id)
        return self.pool.num_free - num_free

    def _known_blocks(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the blocks that a sequence shares with the one matched last, and copy their keys.

        Prompts with a long common prefix often follow one another. Comparing their tokens is much faster than
        looking up every block.
        """
        newest = self._newest
        num_equal = 0 if newest is None else sequence.num_equal_blocks(token_ids, newest, num_blocks)
        # The blocks before a registered one are registered.
        if newest is None or num_equal == 0 or newest.block_ids[num_equal - 1] not in self.tree:
            return []
        if len(sequence.block_keys) < num_equal:
            sequence.block_keys = newest.block_keys[:num_equal]
        return newest.block_ids[:num_equal]

    def _unregister(self, block_id: int) -> int:
        """Drop a block and those below it from the tree; returns how many."""
        dropped = self.tree.remove(block_id)
        for dropped_id in dropped:
            if self.pool.ref_counts[dropped_id] == 0:
                self.pool.uncache(dropped_id)
        return len(dropped)
