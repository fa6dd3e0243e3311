"""Invariants of pool, tree and sequences between operations, as assertions. O(all blocks): for tests."""

from collections import Counter
from collections.abc import Collection

from octavo.kv.block_pool import BlockPool
from octavo.kv.prefix_tree import ROOT, PrefixTree
from octavo.kv.sequence_blocks import SequenceBlocks


def check_pool(pool: BlockPool, tree: PrefixTree) -> None:
    """Assert that free + cached + referenced == total, each block in one place, cached iff registered."""
    free, cached = set(pool.free_ids), set(pool.cached_ids)
    referenced = {block_id for block_id, count in enumerate(pool.ref_counts) if count}
    assert all(count >= 0 for count in pool.ref_counts), "a reference count is negative"
    assert len(free) == pool.num_free, "a block is free twice"
    assert len(free) + len(cached) + len(referenced) == pool.num_blocks, "blocks are lost or counted twice"
    assert free | cached | referenced == set(range(pool.num_blocks)), "a block is in no place"
    assert all(block_id in tree for block_id in cached), "a cached block cannot be hit"
    assert not any(block_id in tree for block_id in free), "a free block can be hit"
    assert pool.num_kept == len(cached & pool.to_keep) <= pool.max_kept, "other blocks are kept than may be"
    assert not free & pool.to_keep, "a free block is kept"
    assert pool.num_shared == sum(count > 1 for count in pool.ref_counts), "num_shared is off"


def check_sequences(pool: BlockPool, tree: PrefixTree, sequences: Collection[SequenceBlocks]) -> None:
    """Assert that references equal table entries and that nobody can write a block that others read."""
    uses = Counter(block_id for sequence in sequences for block_id in sequence.block_ids)
    assert dict(uses) == {block_id: count for block_id, count in enumerate(pool.ref_counts) if count}, (
        "reference counts differ from the live block tables"
    )
    for sequence in sequences:
        _check_sequence(pool, tree, sequence)


def check_prefixes(tree: PrefixTree, sequences: Collection[SequenceBlocks]) -> None:
    """Assert that the tree is sound and holds every committed block under its key and predecessor."""
    tree.check_invariants()
    for sequence in sequences:
        parent_id = ROOT
        for index in range(sequence.num_committed):
            found = tree.find(parent_id, sequence.block_keys[index])
            parent_id = sequence.block_ids[index]
            assert found == parent_id, f"committed block {parent_id} is not registered where it should be"


def _check_sequence(pool: BlockPool, tree: PrefixTree, sequence: SequenceBlocks) -> None:
    ids = sequence.block_ids
    num_full = sequence.num_filled_tokens // sequence.block_size
    assert len(set(ids)) == len(ids), f"a block is twice in one sequence: {ids}"
    assert sequence.num_committed <= num_full, "a block is committed before it is full"
    assert sequence.num_filled_tokens <= sequence.capacity, "tokens without a slot"
    for block_id in ids[num_full:]:
        assert pool.ref_counts[block_id] == 1, f"block {block_id} is writable, yet shared"
        assert block_id not in tree, f"block {block_id} is writable, yet can be hit"
