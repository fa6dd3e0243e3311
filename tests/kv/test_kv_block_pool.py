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
