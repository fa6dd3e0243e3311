"""The manager's memory: match, publish, commit, eviction."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import TEN, Managers, computed, num_matched

from octavo.errors import InvalidArgumentError
from octavo.kv import KVCacheManager, SequenceBlocks


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
    assert manager.match_prefix(sequence, TEN, 9) == 0
    with pytest.raises(InvalidArgumentError, match="token ids of earlier calls"):
        manager.match_prefix(sequence, other, 9)
    assert manager.match_prefix(sequence, TEN, 9) == 0
    manager.allocate(sequence, 10)
    for say in (manager.publish, manager.commit):
        with pytest.raises(InvalidArgumentError, match="token ids of earlier calls"):
            say(sequence, other, 10)
    assert sequence.num_filled_tokens == 0
    manager.free(sequence)
    assert manager.match_prefix(sequence, other, 9) == 0


def test_without_publishing_only_computed_tokens_are_registered(make: Managers) -> None:
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


def test_published_blocks_are_shared_before_they_are_computed(make: Managers) -> None:
    manager = make()
    first, second = manager.new_sequence(), manager.new_sequence()
    manager.allocate(first, 10)
    manager.publish(first, TEN, 7)  # a chunk
    assert num_matched(manager, TEN) == 4
    manager.publish(first, TEN, 10)
    manager.publish(first, TEN, 10)
    assert (first.num_committed, first.num_filled_tokens) == (2, 8)
    assert manager.match_prefix(second, TEN, 9) == 8
    assert second.block_ids == first.block_ids[:2]
    manager.check_invariants()
    manager.free(first)  # the step that computes them still runs
    assert num_matched(manager, TEN) == 8
    assert manager.commit(second, TEN, 8) is False


def test_a_block_about_to_be_computed_is_exchanged_only_afterwards(make: Managers) -> None:
    """A step must not write to a block that others read."""
    manager = make()
    eight = TEN[:8]
    first, second = manager.new_sequence(), manager.new_sequence()
    for sequence in (first, second):
        manager.match_prefix(sequence, eight, 7)
        manager.allocate(sequence, 8)
        manager.publish(sequence, eight, 8)
        manager.check_invariants()
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    assert (second.num_committed, second.num_filled_tokens) == (1, 4)
    assert manager.commit(first, eight, 8) is False
    assert manager.commit(second, eight, 8) is True
    assert second.block_ids == first.block_ids


def test_a_published_block_that_collides_stays_private(make: Managers) -> None:
    manager = make(block_size=2, hash_block=lambda parent_digest, content: content[-4:])
    computed(manager, [1, 7])
    collided = manager.new_sequence()
    manager.allocate(collided, 4)
    manager.publish(collided, [2, 7, 0, 0], 4)
    assert collided.num_committed == collided.num_filled_tokens == 0
    assert num_matched(manager, [2, 7, 0, 0]) == 0


def test_what_a_failed_step_published_is_forgotten(make: Managers) -> None:
    manager = make()
    computing, attached = manager.new_sequence(), manager.new_sequence()
    manager.allocate(computing, 10)
    manager.publish(computing, TEN, 10)
    manager.match_prefix(attached, TEN, 9)
    manager.free(computing)
    manager.free(attached)
    assert manager.reset_prefix_cache() == 2
    assert num_matched(manager, TEN) == 0


def test_more_tokens_than_known_or_allocated_are_refused(make: Managers) -> None:
    manager = make()
    sequence = manager.new_sequence()
    manager.allocate(sequence, 4)
    for say in (manager.publish, manager.commit):
        with pytest.raises(InvalidArgumentError, match="at least 11 token ids"):
            say(sequence, TEN, 11)
        with pytest.raises(InvalidArgumentError, match=r"expected 0 \.\. 4 tokens"):
            say(sequence, TEN, 5)
    assert sequence.num_filled_tokens == 0


def test_without_prefix_caching_nothing_is_kept(make: Managers) -> None:
    manager = make(enable_prefix_caching=False)
    sequence = computed(manager, TEN)
    assert sequence.num_committed == 2
    assert sequence.block_keys == []
    manager.publish(sequence, TEN, 10)
    probe = manager.new_sequence()
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
        assert num_matched(manager, [*range(12), 0]) == expected
        manager.free(hog)
    assert manager.stats().num_evictions == 3


def test_token_ids_must_be_integers_of_32_bits(make: Managers) -> None:
    for bad in ([2**31, 0, 0, 0, 0], [0.5, 0, 0, 0, 0]):
        with pytest.raises(InvalidArgumentError, match="32 bits"):
            make().match_prefix(make().new_sequence(), bad, 4)  # type: ignore[arg-type]


def test_committing_fewer_tokens_than_before_changes_nothing(make: Managers) -> None:
    manager = make()
    sequence = computed(manager, TEN)
    assert manager.commit(sequence, TEN, 3) is False
    assert sequence.num_filled_tokens == 10
    assert sequence.num_committed == 2


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


# Few different tokens, so that prompts part anywhere, inside blocks and between them.
PROMPTS = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a", b"odd"]),
        st.integers(0, 14),
        st.integers(0, 6),
        st.booleans(),
        st.sampled_from(["keep", "free", "free the one before"]),
    ),
    min_size=2,
    max_size=12,
)


@settings(deadline=None)
@given(PROMPTS)
def test_prompts_that_follow_one_another_match_what_was_published(
    drawn: list[tuple[bytes, int, int, bool, str]],
) -> None:
    """As long a run of blocks as any earlier prompt with the salt has, whoever was matched last."""
    manager = KVCacheManager(200, 2)
    seen: list[tuple[bytes, list[int]]] = []
    live: list[SequenceBlocks] = []
    for salt, num_common, num_own, packed, then in drawn:
        prompt = [7] * num_common + [len(seen)] * num_own + [99]
        ids = array("i", prompt) if packed else prompt
        sequence = manager.new_sequence(salt)
        expected = 0
        for other_salt, other in seen:
            common = next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
            common = min(len(prompt), len(other)) if common is None else common
            if salt == other_salt:
                expected = max(expected, min(common, len(prompt) - 1) // 2 * 2)
        assert manager.match_prefix(sequence, ids, len(prompt) - 1) == expected
        assert manager.allocate(sequence, len(prompt))
        manager.publish(sequence, ids, len(prompt))
        manager.check_invariants()
        seen.append((salt, prompt))
        live.append(sequence)
        if then != "keep" and len(live) > (then != "free"):
            manager.free(live.pop(-1 if then == "free" else -2))
    for sequence in live:
        manager.free(sequence)
    manager.check_invariants()
    assert manager.stats().num_referenced == 0
