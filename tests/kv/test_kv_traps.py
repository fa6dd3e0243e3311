"""Mistakes other cache managers made, each as a test."""

import subprocess
import sys

import pytest

from octavo.kv import KVCacheManager, SequenceBlocks, next_position, slot_mapping


def run(manager: KVCacheManager, token_ids: list[int], salt: bytes = b"") -> tuple[SequenceBlocks, int]:
    """Admit and compute a sequence; returns it and how many tokens came from the cache."""
    sequence = manager.new_sequence(salt)
    num_cached = manager.match_prefix(sequence, token_ids, len(token_ids) - 1)
    assert manager.allocate(sequence, len(token_ids))
    manager.commit(sequence, token_ids, len(token_ids))
    manager.check_invariants()
    return sequence, num_cached


def test_kv_imports_no_torch() -> None:
    code = "import sys, octavo.kv.manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_trap_a_a_full_hit_leaves_a_token_to_compute() -> None:
    manager = KVCacheManager(8, 4)
    run(manager, list(range(8)))
    sequence, num_cached = run(manager, list(range(8)))
    assert num_cached == 4
    assert len(sequence.block_ids) == 2


def test_trap_a_a_prompt_larger_than_the_pool_is_known_in_advance() -> None:
    manager = KVCacheManager(2, 4)
    assert not manager.can_ever_fit(9)
    assert not manager.allocate(manager.new_sequence(), 9)
    assert manager.num_free_blocks == 2


def test_trap_a_a_lone_sequence_that_exhausts_the_pool_is_told_not_now() -> None:
    manager = KVCacheManager(2, 4)
    sequence, _ = run(manager, list(range(8)))
    assert not manager.allocate(sequence, 9)
    manager.free(sequence)
    assert manager.num_free_blocks == 2


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 256])
def test_trap_a_any_block_size_works(block_size: int) -> None:
    manager = KVCacheManager(40, block_size)
    token_ids = list(range(3 * block_size + 1))
    run(manager, token_ids)
    _, num_cached = run(manager, token_ids)
    assert num_cached == 3 * block_size


def test_trap_a_colliding_hashes_never_cause_wrong_reuse() -> None:
    manager = KVCacheManager(16, 2, hash_block=lambda parent_digest, content: b"constant")
    first, _ = run(manager, [1, 2, 3, 4, 5])
    assert first.num_committed == 1  # the second block collides with the first
    for token_ids, salt, expected in [
        ([1, 2, 3, 4, 5], b"", 2),
        ([1, 2, 1, 2, 1, 2], b"", 2),  # equal contents further down are not the first block
        ([3, 4, 1, 2], b"", 0),
        ([1, 2, 3], b"other", 0),
    ]:
        _, num_cached = run(manager, token_ids, salt)
        assert num_cached == expected


def test_trap_a_blocks_after_a_collided_one_stay_private() -> None:
    # Blocks of 2 collide whenever their second tokens are equal, whatever comes before them.
    manager = KVCacheManager(16, 2, hash_block=lambda parent_digest, content: content[-4:])
    first, _ = run(manager, [1, 7, 5, 8, 0])
    second, num_cached = run(manager, [2, 7, 5, 8, 0])
    assert num_cached == 0
    assert second.num_committed == 0
    assert not set(first.block_ids) & set(second.block_ids)


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8], ids=["B-1", "B", "B+1", "2B"])
def test_trap_b_growth_and_waste_at_block_edges(num_tokens: int) -> None:
    manager = KVCacheManager(8, 4, bytes_per_block=40)
    token_ids = list(range(num_tokens + 1))
    sequence, _ = run(manager, token_ids[:num_tokens])
    waste = -num_tokens % 4
    assert manager.stats().reserved_unfilled_tokens == waste
    assert manager.stats().reserved_unfilled_bytes == 10 * waste
    block_index, offset = next_position(num_tokens, 4)
    grows = block_index == len(sequence.block_ids)
    assert grows is (waste == 0)
    assert manager.allocate(sequence, num_tokens + 1)
    assert len(sequence.block_ids) == block_index + 1
    slot = slot_mapping(sequence.block_ids, num_tokens, num_tokens + 1, 4)
    assert slot.tolist() == [sequence.block_ids[block_index] * 4 + offset]


def test_trap_b_reserved_but_empty_blocks_are_waste() -> None:
    manager = KVCacheManager(8, 4)
    assert manager.allocate(manager.new_sequence(), 32)
    assert manager.stats().reserved_unfilled_tokens == 32


def test_trap_b_finished_sequences_have_nowhere_to_write() -> None:
    manager = KVCacheManager(4, 4)
    sequence, _ = run(manager, [1, 2, 3])
    manager.free(sequence)
    assert sequence.block_ids == []
    assert sequence.capacity == 0


def test_trap_b_sequences_grow_independently() -> None:
    manager = KVCacheManager(8, 4)
    long, _ = run(manager, list(range(17)))
    short, _ = run(manager, [50])
    assert (len(long.block_ids), len(short.block_ids)) == (5, 1)
    manager.free(long)
    assert manager.allocate(short, 32)


def test_trap_c_worked_example_of_extending_a_cached_prefix() -> None:
    # "12345" is 7 tokens (two of framing, five digits), "1234512345" is 12.
    manager = KVCacheManager(64, 1)
    framing, digits = [1, 29871], [29896, 29906, 29941, 29946, 29945]
    first = framing + digits
    second = framing + digits + digits
    manager.free(run(manager, first)[0])
    assert manager.stats().num_cached == 7
    sequence = manager.new_sequence()
    num_cached = manager.match_prefix(sequence, second, len(second) - 1)
    assert (len(second), num_cached, len(second) - num_cached) == (12, 7, 5)
    assert manager.allocate(sequence, len(second))
    assert list(range(num_cached, len(second))) == [7, 8, 9, 10, 11]
    assert len(set(slot_mapping(sequence.block_ids, 0, 12, 1).tolist())) == 12


def test_trap_c_block_size_one_full_hit_leaves_one_token() -> None:
    manager = KVCacheManager(16, 1)
    run(manager, [1, 2, 3])
    assert run(manager, [1, 2, 3])[1] == 2


def test_trap_c_many_sequences_share_one_prefix() -> None:
    manager = KVCacheManager(8, 4)
    prefix = list(range(8))
    keeper, _ = run(manager, [*prefix, 0])
    sequences = []
    for _ in range(40_000):
        sequence = manager.new_sequence()
        manager.match_prefix(sequence, prefix, 8)
        sequences.append(sequence)
    manager.check_invariants()
    assert manager.stats().num_referenced == 3
    for sequence in sequences:
        manager.free(sequence)
    manager.free(keeper)
    assert manager.num_free_blocks == 8
