"""Invariants of pool, tree and sequences between operations, as assertions. O(all blocks): for tests."""

from collections import Counter
from collections.abc import Collection

from octavo.kv.block_store import BlockStore
from octavo.kv.prefix_tree import ROOT, PrefixTree
from octavo.kv.sequence_blocks import GONE, SequenceBlocks


def check_pool(store: BlockStore) -> None:
    """Assert that free + cached + referenced == total, each page in one place, cached iff registered."""
    store.registry.check_invariants()
    pool, registered = store.pool, set(store.registry.pages)
    free, cached = set(pool.free_ids), set(pool.cached_ids)
    referenced = {block_id for block_id, count in enumerate(pool.ref_counts) if count}
    assert all(count >= 0 for count in pool.ref_counts), "a reference count is negative"
    assert len(free) == pool.num_free, "a block is free twice"
    assert len(free) + len(cached) + len(referenced) == pool.num_blocks, "blocks are lost or counted twice"
    assert free | cached | referenced == set(range(pool.num_blocks)), "a block is in no place"
    assert cached <= registered, "a cached block cannot be hit"
    assert not free & registered, "a free block can be hit"
    assert pool.num_kept == len(cached & pool.to_keep) <= pool.max_kept, "other blocks are kept than may be"
    assert not free & pool.to_keep, "a free block is kept"
    assert pool.num_shared == sum(count > 1 for count in pool.ref_counts), "num_shared is off"


def check_sequences(store: BlockStore, sequences: Collection[SequenceBlocks]) -> None:
    """Assert that references equal table entries and that nobody can write a block that others read."""
    uses = Counter(page for sequence in sequences for page in store.held_pages(sequence))
    assert dict(uses) == {page: count for page, count in enumerate(store.pool.ref_counts) if count}, (
        "reference counts differ from the live block tables"
    )
    writers, readers = Counter[int](), set[int]()
    for sequence in sequences:
        _check_sequence(store, sequence)
        num_full = sequence.num_filled_tokens // sequence.block_size
        readers.update(sequence.block_ids[:num_full])
        writers.update(sequence.block_ids[num_full:])
    assert all(count == 1 for count in writers.values()), "two sequences may write one block"
    assert not readers & writers.keys(), "a block that someone reads may be written"


def check_prefixes(tree: PrefixTree, sequences: Collection[SequenceBlocks]) -> None:
    """Assert that the tree is sound and holds every committed block under its key and predecessor."""
    tree.check_invariants()
    for sequence in sequences:
        parent_id = ROOT
        for index in range(sequence.num_committed):
            found = tree.find(parent_id, sequence.block_keys[index])
            parent_id = sequence.block_ids[index]
            assert found == parent_id, f"committed block {parent_id} is not registered where it should be"


def _check_sequence(store: BlockStore, sequence: SequenceBlocks) -> None:
    ids = sequence.block_ids
    num_full = sequence.num_filled_tokens // sequence.block_size
    assert len(set(ids)) == len(ids), f"a block is twice in one sequence: {ids}"
    assert sequence.num_committed <= num_full, "a block is committed before it is full"
    assert sequence.num_filled_tokens <= sequence.capacity, "tokens without a slot"
    for block_id in ids[num_full:]:
        assert block_id not in store.tree, f"block {block_id} is writable, yet can be hit"
        # Others may read registered blocks of its page.
        count = store.pool.ref_counts[store.page(block_id)]
        assert count == 1 or store.layout.groups[0].blocks_per_page > 1, f"block {block_id} is shared"
    for group, window in enumerate(sequence.windows, start=1):
        assert window.num_gone <= len(window.block_ids) <= len(ids), "a window reaches further than it may"
        assert all(block_id == GONE for block_id in window.block_ids[: window.num_gone]), "gone, yet there"
        assert GONE not in window.held, "a block is gone in the middle"
        assert len(set(window.held)) == len(window.held), f"a block is twice in one window: {window}"
        for block_id in window.block_ids[max(num_full, window.num_gone) :]:
            page = store.page(block_id, group)
            assert store.pool.ref_counts[page] == 1, f"page {page} is writable, yet shared"
            assert page not in store.registry.pages, f"page {page} is writable, yet can be hit"
