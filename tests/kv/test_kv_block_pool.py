"""Reference counts and the three places a block can be in."""

import pytest

from octavo.errors import InvalidArgumentError
from octavo.kv import BlockPool


def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert allocate(pool, 2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    assert allocate(pool, 1) == [2]
    assert pool.allocate(0) == []


def test_free_blocks_go_first_then_the_least_recently_used_cached_ones() -> None:
    pool = BlockPool(4)
    allocate(pool, 4)
    pool.release(2, cached=True)
    pool.release(0, cached=True)
    pool.release(3, cached=False)
    assert allocate(pool, 3) == [3, 2, 0]


def test_a_retained_block_moves_to_the_young_end_when_released_again() -> None:
    pool = BlockPool(3)
    for block_id in allocate(pool, 3):
        pool.release(block_id, cached=True)
    pool.retain(0)
    pool.release(0, cached=True)
    assert pool.cached_ids == [1, 2, 0]


def test_num_shared_counts_blocks_with_two_or_more_references() -> None:
    pool = BlockPool(2)
    allocate(pool, 2)
    pool.retain(0)
    pool.retain(0)
    assert pool.num_shared == 1
    pool.release(0, cached=False)
    assert pool.num_shared == 1
    pool.release(0, cached=False)
    assert pool.num_shared == 0


@pytest.mark.parametrize("block_id", [-1, 2, 2**15])
def test_ids_outside_the_pool_are_refused_not_clamped_or_wrapped(block_id: int) -> None:
    pool = BlockPool(2)
    allocate(pool, 2)
    for operation in (lambda: pool.release(block_id, cached=False), lambda: pool.retain(block_id)):
        with pytest.raises(InvalidArgumentError, match=r"block ids are 0 \.\. 1"):
            operation()
    assert pool.ref_counts == [1, 1]


def test_double_free_is_refused() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.release(0, cached=False)
    with pytest.raises(InvalidArgumentError, match="freed twice"):
        pool.release(0, cached=False)
    assert pool.num_free == 1


def test_a_free_block_cannot_be_retained_or_uncached() -> None:
    pool = BlockPool(1)
    with pytest.raises(InvalidArgumentError, match="is free"):
        pool.retain(0)
    with pytest.raises(InvalidArgumentError, match="is not cached"):
        pool.uncache(0)


def test_reference_counts_exceed_16_bits() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    for _ in range(2**16):
        pool.retain(0)
    assert pool.ref_counts[0] == 2**16 + 1
    for _ in range(2**16):
        pool.release(0, cached=False)
    assert pool.num_available == 0
    pool.release(0, cached=False)
    assert pool.num_available == 1


@pytest.mark.parametrize("num_references", [1, 2, 3, 4])
def test_several_blocks_at_once_are_retained_and_released_as_one_by_one(num_references: int) -> None:
    one_by_one, at_once = BlockPool(4), BlockPool(4)
    block_ids = allocate(one_by_one, 3)
    assert allocate(at_once, 3) == block_ids
    for _ in range(num_references - 1):
        for block_id in block_ids:
            one_by_one.retain(block_id)
        at_once.retain_all(block_ids)
    for left in reversed(range(num_references)):
        for block_id in block_ids:
            one_by_one.release(block_id, cached=block_id != 1)
        at_once.release_all(block_ids, cached={0, 2})
        assert at_once.ref_counts == one_by_one.ref_counts == [left, left, left, 0]
        assert at_once.num_shared == one_by_one.num_shared
    assert at_once.cached_ids == one_by_one.cached_ids == [0, 2]
    assert at_once.free_ids == one_by_one.free_ids
    at_once.retain_all([2, 0])
    assert at_once.ref_counts == [1, 0, 1, 0]


@pytest.mark.parametrize("block_id", [-1, 4, 3])
def test_several_blocks_at_once_are_checked(block_id: int) -> None:
    """Also a negative one, which would be somebody else's block; and one that is free."""
    pool = BlockPool(4)
    for _ in range(3):
        pool.retain_all(pool.allocate(3) or [0, 1, 2])
    with pytest.raises(InvalidArgumentError):
        pool.retain_all([0, block_id])
    with pytest.raises(InvalidArgumentError):
        pool.release_all([1, block_id], cached=())
    assert pool.ref_counts == [5, 3, 4, 0]
