"""Sequences that ask for it: their cached blocks are evicted after those of others, up to a number."""

import pytest
from kv_helpers import Managers, num_matched

from octavo.errors import InvalidArgumentError
from octavo.kv import KVCacheManager


def serve(
    manager: KVCacheManager, token: int, num_blocks: int, *, keep: bool, salt: bytes = b""
) -> list[int]:
    """Compute and free a sequence of full blocks; return its tokens and one more."""
    tokens = [token] * (num_blocks * manager.block_size)
    sequence = manager.new_sequence(salt, is_kept=keep)
    manager.match_prefix(sequence, tokens, len(tokens))
    assert manager.allocate(sequence, len(tokens))
    manager.commit(sequence, tokens, len(tokens))
    manager.free(sequence)
    return [*tokens, 0]


def crowd(manager: KVCacheManager, num_blocks: int, token: int = 99) -> None:
    serve(manager, token, num_blocks, keep=False)


def test_kept_blocks_outlive_newer_ones(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=4)
    kept, other = serve(manager, 1, 3, keep=True), serve(manager, 2, 3, keep=False)
    crowd(manager, 5)
    assert (num_matched(manager, kept), num_matched(manager, other)) == (12, 0)


def test_kept_blocks_never_refuse_room(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=8)
    kept = serve(manager, 1, 8, keep=True)
    assert manager.num_free_blocks == 8
    crowd(manager, 8)
    assert num_matched(manager, kept) == 0
    assert not manager.store.pool.to_keep


def test_the_share_is_bounded_and_the_least_recently_used_goes(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=3)
    first, second = serve(manager, 1, 2, keep=True), serve(manager, 2, 3, keep=True)
    assert manager.store.pool.num_kept == 3
    crowd(manager, 5)
    assert (num_matched(manager, first), num_matched(manager, second)) == (0, 12)


def test_ends_of_prefixes_go_before_their_beginnings(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=2)
    kept = serve(manager, 1, 4, keep=True)
    crowd(manager, 6)
    assert num_matched(manager, kept) == 8


def test_a_hit_by_another_sequence_leaves_a_kept_prefix_kept(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=4)
    kept = serve(manager, 1, 3, keep=True)
    serve(manager, 1, 4, keep=False)
    crowd(manager, 5)
    assert num_matched(manager, kept) == 12


@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_a_kept_prefix_is_found_under_its_own_salt_alone(make: Managers, salt: bytes) -> None:
    manager = make(8, 4, max_kept_blocks=4)
    kept = serve(manager, 1, 3, keep=True, salt=salt)
    assert num_matched(manager, kept, salt) == 12
    assert num_matched(manager, kept, b"other") == 0


def test_without_a_share_nobody_may_ask(make: Managers) -> None:
    manager = make(8, 4)
    kept = serve(manager, 1, 3, keep=True)
    crowd(manager, 8)
    assert num_matched(manager, kept) == 0
    assert not manager.store.pool.to_keep


def test_forks_and_a_cache_made_anew_follow(make: Managers) -> None:
    manager = make(8, 4, max_kept_blocks=4)
    parent = manager.new_sequence(is_kept=True)
    assert manager.allocate(parent, 8)
    manager.commit(parent, [1] * 8, 8)
    forked = manager.fork(parent, 8)
    assert forked is not None
    assert forked[0].is_kept
    manager.reset()
    assert manager.store.pool.max_kept == 4
    assert not manager.store.pool.to_keep


def test_a_share_below_zero_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="max_kept_blocks >= 0"):
        KVCacheManager(8, 4, max_kept_blocks=-1)
