"""The manager's blocks: allocate, fork, truncate, free, figures."""

import pytest
from kv_helpers import TEN, Managers, computed, num_matched

from octavo.errors import InvalidArgumentError
from octavo.kv import BlockTables, KVCacheManager


def test_allocate_grows_only_and_false_changes_nothing(make: Managers) -> None:
    manager = make(num_blocks=4)
    sequence = manager.new_sequence()
    assert manager.allocate(sequence, 9)
    assert len(sequence.block_ids) == 3
    assert manager.allocate(sequence, 12)
    assert manager.allocate(sequence, 1)
    assert len(sequence.block_ids) == 3
    before = list(sequence.block_ids), manager.stats()
    assert not manager.allocate(sequence, 17)
    assert (list(sequence.block_ids), manager.stats()) == before
    assert manager.num_free_blocks == 1


@pytest.mark.parametrize(("num_tokens", "fits"), [(0, True), (31, True), (32, True), (33, False)])
def test_can_ever_fit(make: Managers, num_tokens: int, fits: bool) -> None:
    assert make().can_ever_fit(num_tokens) is fits


def test_free_is_idempotent_and_a_freed_sequence_may_start_over(make: Managers) -> None:
    manager = make()
    sequence = computed(manager, TEN)
    manager.free(sequence)
    manager.free(sequence)
    assert manager.num_free_blocks == 8
    assert manager.match_prefix(sequence, TEN, 9) == 8
    manager.free(sequence)
    other = [5] * 10
    assert manager.match_prefix(sequence, other, 9) == 0


def test_a_sequence_of_another_manager_is_refused(make: Managers) -> None:
    sequence = computed(make(), TEN)
    other = make()
    with pytest.raises(InvalidArgumentError, match="another manager"):
        other.allocate(sequence, 20)
    with pytest.raises(InvalidArgumentError, match="another manager"):
        other.free(sequence)


@pytest.mark.parametrize(("num_blocks", "block_size", "num_bytes"), [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_a_manager_without_blocks_is_refused(num_blocks: int, block_size: int, num_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks >= 1"):
        KVCacheManager(num_blocks, block_size, bytes_per_block=num_bytes)


def test_fork_shares_full_blocks_and_copies_the_partial_tail(make: Managers) -> None:
    manager = make()
    parent = computed(manager, TEN)
    forked = manager.fork(parent, 9)
    assert forked is not None
    child, copies = forked
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert copies == [(parent.block_ids[2], child.block_ids[2])]
    assert child.num_filled_tokens == 9
    assert manager.stats().num_referenced == 4


def test_fork_at_a_block_edge_copies_nothing(make: Managers) -> None:
    manager = make(num_blocks=3)
    parent = computed(manager, TEN)
    forked = manager.fork(parent, 8)
    assert forked is not None
    assert forked[1] == []
    assert forked[0].block_ids == parent.block_ids[:2]
    assert manager.num_free_blocks == 0


def test_fork_without_a_free_block_changes_nothing(make: Managers) -> None:
    manager = make(num_blocks=3)
    parent = computed(manager, TEN)
    before = manager.stats()
    assert manager.fork(parent, 9) is None
    assert manager.stats() == before


def test_fork_refuses_tokens_that_are_not_in_the_cache(make: Managers) -> None:
    manager = make()
    parent = computed(manager, TEN, 6)
    manager.allocate(parent, 10)
    with pytest.raises(InvalidArgumentError, match=r"0 \.\. 6 tokens"):
        manager.fork(parent, 7)


def test_truncate_drops_blocks_tokens_and_keys(make: Managers) -> None:
    manager = make()
    sequence = computed(manager, TEN)
    manager.truncate(sequence, 9)
    assert len(sequence.block_ids) == 3
    manager.truncate(sequence, 4)
    assert len(sequence.block_ids) == 1
    assert sequence.num_committed == 1
    assert sequence.num_filled_tokens == 4
    manager.allocate(sequence, 8)
    other = [*TEN[:4], 70, 71, 72, 73, 74]
    manager.commit(sequence, other, 8)
    assert num_matched(manager, other) == 8
    assert num_matched(manager, TEN) == 8  # the dropped block stays cached


def test_truncate_inside_a_registered_block_is_refused(make: Managers) -> None:
    manager = make()
    sequence = computed(manager, TEN)
    before = list(sequence.block_ids)
    with pytest.raises(InvalidArgumentError, match="fork and free"):
        manager.truncate(sequence, 7)
    assert sequence.block_ids == before
    assert sequence.num_filled_tokens == 10
    forked = manager.fork(sequence, 7)
    assert forked is not None
    manager.free(sequence)
    assert forked[1] == [(before[1], forked[0].block_ids[1])]


def test_truncate_inside_a_shared_block_is_refused_without_prefix_caching_too(make: Managers) -> None:
    manager = make(enable_prefix_caching=False)
    parent = computed(manager, TEN)
    forked = manager.fork(parent, 8)
    assert forked is not None
    with pytest.raises(InvalidArgumentError, match="fork and free"):
        manager.truncate(parent, 7)
    manager.free(forked[0])
    manager.truncate(parent, 7)
    assert len(parent.block_ids) == 2
    assert parent.num_committed == 1


def test_truncate_beyond_the_blocks_is_refused(make: Managers) -> None:
    manager = make()
    with pytest.raises(InvalidArgumentError, match=r"expected 0 \.\. 12 tokens"):
        manager.truncate(computed(manager, TEN), 13)


def test_stats_count_partial_and_empty_reserved_blocks(make: Managers) -> None:
    manager = make(bytes_per_block=400)
    sequence = computed(manager, TEN)
    assert manager.stats().reserved_unfilled_tokens == 2
    manager.allocate(sequence, 20)
    stats = manager.stats()
    assert stats.reserved_unfilled_tokens == 10
    assert stats.reserved_unfilled_bytes == 1000
    assert (stats.num_free, stats.num_cached, stats.num_referenced, stats.num_blocks) == (3, 0, 5, 8)
    assert stats.usage == 5 / 8
    manager.fork(sequence, 9)
    assert manager.stats().reserved_unfilled_tokens == 13


@pytest.mark.parametrize("num_kept", [0, 4, 8])
def test_block_tables_follow_when_blocks_are_dropped_and_others_taken(make: Managers, num_kept: int) -> None:
    manager, tables = make(), BlockTables(1, 8)
    sequence = computed(manager, TEN)
    tables.update(0, sequence.block_ids)
    if num_kept:
        manager.truncate(sequence, num_kept)
    else:
        manager.free(sequence)
    computed(manager, [70] * 10)
    manager.allocate(sequence, 16)
    tables.update(0, sequence.block_ids)
    assert tables.rows([0], 4)[0].tolist() == sequence.block_ids
