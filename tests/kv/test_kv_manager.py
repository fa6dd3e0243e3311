"""The manager's operations one by one."""

from collections.abc import Iterator

import pytest

from octavo.errors import InvalidArgumentError
from octavo.kv import KVCacheManager, SequenceBlocks


class Managers:
    """Makes managers and checks each one's invariants at the end of the test."""

    def __init__(self) -> None:
        self.made: list[KVCacheManager] = []

    def __call__(self, num_blocks: int = 8, block_size: int = 4, **options: object) -> KVCacheManager:
        self.made.append(KVCacheManager(num_blocks, block_size, **options))  # type: ignore[arg-type]
        return self.made[-1]


@pytest.fixture
def make() -> Iterator[Managers]:
    managers = Managers()
    yield managers
    for manager in managers.made:
        manager.check_invariants()


def computed(
    manager: KVCacheManager, token_ids: list[int], num_tokens: int | None = None, salt: bytes = b""
) -> SequenceBlocks:
    """Make a sequence without looking for cached blocks, and compute its tokens."""
    sequence = manager.new_sequence(salt)
    num_tokens = len(token_ids) if num_tokens is None else num_tokens
    assert manager.allocate(sequence, num_tokens)
    manager.commit(sequence, token_ids, num_tokens)
    return sequence


def num_matched(manager: KVCacheManager, token_ids: list[int], salt: bytes = b"") -> int:
    probe = manager.new_sequence(salt)
    num_tokens = manager.match_prefix(probe, token_ids, len(token_ids) - 1)
    manager.free(probe)
    return num_tokens


TEN = list(range(10))


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


def test_match_attaches_full_blocks_and_shares_them(make: Managers) -> None:
    manager = make()
    first = computed(manager, TEN)
    second = manager.new_sequence()
    assert manager.match_prefix(second, TEN, 9) == 8
    assert second.block_ids == first.block_ids[:2]
    assert second.num_committed == 2
    assert second.num_filled_tokens == 8
    assert manager.stats().num_shared == 2


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(-1, 0), (0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (10, 8)]
)
def test_match_covers_at_most_max_tokens(make: Managers, max_tokens: int, expected: int) -> None:
    manager = make()
    computed(manager, TEN)
    assert manager.match_prefix(manager.new_sequence(), TEN, max_tokens) == expected


def test_match_refuses_a_sequence_with_blocks_and_unknown_tokens(make: Managers) -> None:
    manager = make()
    sequence = computed(manager, TEN)
    with pytest.raises(InvalidArgumentError, match="empty sequence"):
        manager.match_prefix(sequence, TEN, 9)
    with pytest.raises(InvalidArgumentError, match="at least 11 token ids, got 10"):
        manager.match_prefix(manager.new_sequence(), TEN, 11)


def test_other_tokens_than_before_are_refused_until_the_sequence_is_freed(make: Managers) -> None:
    manager = make()
    computed(manager, TEN)
    sequence = manager.new_sequence(b"salt")
    other = [*TEN[:3], 77, *TEN[4:]]
    manager.is_prefix_in_flight(sequence, TEN, 9)
    manager.announce(sequence, TEN)
    with pytest.raises(InvalidArgumentError, match="token ids of earlier calls"):
        manager.match_prefix(sequence, other, 9)
    assert manager.match_prefix(sequence, TEN, 9) == 0
    manager.allocate(sequence, 10)
    with pytest.raises(InvalidArgumentError, match="token ids of earlier calls"):
        manager.commit(sequence, other, 10)
    assert sequence.num_filled_tokens == 0
    manager.free(sequence)
    assert manager.match_prefix(sequence, other, 9) == 0


def test_only_computed_tokens_are_registered(make: Managers) -> None:
    manager = make()
    sequence = manager.new_sequence()
    manager.allocate(sequence, 10)
    manager.commit(sequence, TEN, 7)
    assert sequence.num_committed == 1
    assert num_matched(manager, TEN) == 4
    manager.commit(sequence, TEN, 8)
    assert num_matched(manager, TEN) == 8


def test_salts_separate_sequences(make: Managers) -> None:
    manager = make()
    computed(manager, TEN, salt=b"a")
    assert num_matched(manager, TEN, salt=b"a") == 8
    assert num_matched(manager, TEN, salt=b"b") == 0
    assert num_matched(manager, TEN) == 0


def test_commit_deduplicates_blocks_computed_twice(make: Managers) -> None:
    manager = make()
    first, second = manager.new_sequence(), manager.new_sequence()
    manager.allocate(first, 10)
    manager.allocate(second, 10)
    assert manager.commit(first, TEN, 10) is False
    own = second.block_ids
    assert manager.commit(second, TEN, 10) is True
    assert second.block_ids is not own
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert manager.stats().num_referenced == 4
    assert manager.stats().num_shared == 2
    assert manager.commit(second, TEN, 10) is False


def test_commit_refuses_more_tokens_than_known_or_allocated(make: Managers) -> None:
    manager = make()
    sequence = manager.new_sequence()
    manager.allocate(sequence, 4)
    with pytest.raises(InvalidArgumentError, match="at least 11 token ids"):
        manager.commit(sequence, TEN, 11)
    with pytest.raises(InvalidArgumentError, match=r"expected 0 \.\. 4 tokens"):
        manager.commit(sequence, TEN, 5)
    assert sequence.num_filled_tokens == 0


def test_without_prefix_caching_nothing_is_kept(make: Managers) -> None:
    manager = make(enable_prefix_caching=False)
    sequence = computed(manager, TEN)
    assert sequence.num_committed == 2
    assert sequence.block_keys == []
    manager.announce(sequence, TEN)
    probe = manager.new_sequence()
    assert not manager.is_prefix_in_flight(probe, TEN, 9)
    assert manager.match_prefix(probe, TEN, 9) == 0
    manager.free(sequence)
    assert manager.stats().num_free == 8


def test_free_keeps_full_blocks_and_evicts_the_tail_first(make: Managers) -> None:
    manager = make(num_blocks=3)
    manager.free(computed(manager, list(range(12))))
    assert manager.stats().num_cached == 3
    for expected in (8, 4, 0):
        hog = manager.new_sequence()
        manager.allocate(hog, 12 - expected)
        assert num_matched(manager, list(range(12)) + [0]) == expected
        manager.free(hog)
    assert manager.stats().num_evictions == 3


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


def test_token_ids_must_be_integers_of_32_bits(make: Managers) -> None:
    for bad in ([2**31, 0, 0, 0, 0], [0.5, 0, 0, 0, 0]):
        with pytest.raises(InvalidArgumentError, match="32 bits"):
            make().match_prefix(make().new_sequence(), bad, 4)  # type: ignore[arg-type]


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


def test_prefix_in_flight_from_announcement_to_commit(make: Managers) -> None:
    manager = make()
    first, second = manager.new_sequence(), manager.new_sequence()
    assert not manager.is_prefix_in_flight(second, TEN, 9)
    manager.allocate(first, 10)
    manager.announce(first, TEN)
    assert manager.is_prefix_in_flight(second, TEN, 9)
    assert manager.is_prefix_in_flight(second, TEN, 4)
    assert not manager.is_prefix_in_flight(second, TEN, 3)
    assert not manager.is_prefix_in_flight(manager.new_sequence(), [*TEN[:3], 9, *TEN[4:]], 9)
    manager.commit(first, TEN, 4)
    assert manager.is_prefix_in_flight(second, TEN, 9)  # its second block still is
    manager.commit(first, TEN, 8)
    assert not manager.is_prefix_in_flight(second, TEN, 9)


def test_announcements_end_with_free_and_survive_one_of_two(make: Managers) -> None:
    manager = make()
    first, second, third = (manager.new_sequence() for _ in range(3))
    for sequence in (first, second):
        manager.announce(sequence, TEN)
        manager.announce(sequence, TEN)
        manager.check_invariants()
    manager.free(first)
    assert manager.is_prefix_in_flight(third, TEN, 9)
    assert not manager.is_prefix_in_flight(second, TEN, 9)  # nobody but itself
    manager.free(second)
    assert not manager.is_prefix_in_flight(third, TEN, 9)


def test_truncate_withdraws_announcements_and_they_can_be_made_again(make: Managers) -> None:
    manager = make()
    first, second = manager.new_sequence(), manager.new_sequence()
    manager.allocate(first, 10)
    manager.announce(first, TEN)
    manager.truncate(first, 4)
    manager.check_invariants()
    manager.commit(first, TEN, 4)
    assert not manager.is_prefix_in_flight(second, TEN, 9)
    manager.announce(first, TEN)
    assert manager.is_prefix_in_flight(second, TEN, 9)


def test_reset_forgets_what_nobody_uses(make: Managers) -> None:
    manager = make()
    kept = computed(manager, TEN)
    manager.free(computed(manager, [9] * 10))
    assert manager.reset_prefix_cache() == 2
    assert num_matched(manager, [9] * 10) == 0
    assert num_matched(manager, TEN) == 8
    manager.free(kept)
    assert manager.reset_prefix_cache() == 2
    assert manager.stats().num_free == 8
    assert manager.stats().num_evictions == 0


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


def test_hit_rate(make: Managers) -> None:
    manager = make()
    assert manager.stats().hit_rate == 0.0
    manager.free(computed(manager, TEN))
    assert num_matched(manager, TEN) == 8
    assert num_matched(manager, [7] * 8) == 0
    assert manager.stats().prefix_query_tokens == 9 + 7
    assert manager.stats().prefix_hit_tokens == 8
    assert manager.stats().hit_rate == 0.5


def test_evicting_a_parent_drops_children_that_only_uncommitted_forks_hold(make: Managers) -> None:
    manager = make(num_blocks=5)
    eight = list(range(8))
    original = computed(manager, eight[:4])  # registers the first block
    parent = manager.new_sequence()
    manager.allocate(parent, 8)
    manager.commit(parent, eight, 3)
    parent.num_filled_tokens = 8  # computed, but not registered yet, when it forks
    forked = manager.fork(parent, 8)
    assert forked is not None
    child = forked[0]
    assert manager.commit(parent, eight, 8)  # repointed to the original's block; the second is its child
    manager.free(original)
    manager.free(parent)
    manager.check_invariants()
    hog = manager.new_sequence()
    assert manager.allocate(hog, 12)  # evicts the original's block below which the child's block was
    manager.check_invariants()
    assert num_matched(manager, [*eight, 0]) == 0
    manager.commit(child, eight, 8)
    assert num_matched(manager, [*eight, 0]) == 8
