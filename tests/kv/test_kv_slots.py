"""Positions, slots and block-table rows, at and around block edges."""

import numpy as np
import pytest

from octavo.errors import InvalidArgumentError
from octavo.kv import BlockTables, last_position, next_position, num_blocks_for, slot_mapping


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "last", "following"),
    [(3, 1, (0, 2), (0, 3)), (4, 1, (0, 3), (1, 0)), (5, 2, (1, 0), (1, 1)), (8, 2, (1, 3), (2, 0))],
    ids=["B-1", "B", "B+1", "2B"],
)
def test_trap_b_lengths_at_block_edges(
    num_tokens: int, num_blocks: int, last: tuple[int, int], following: tuple[int, int]
) -> None:
    assert num_blocks_for(num_tokens, 4) == num_blocks
    assert last_position(num_tokens, 4) == last
    assert next_position(num_tokens, 4) == following


def test_an_empty_sequence_has_a_next_position_but_no_last_one() -> None:
    assert next_position(0, 4) == (0, 0)
    assert num_blocks_for(0, 4) == 0
    with pytest.raises(InvalidArgumentError, match="num_tokens >= 1"):
        last_position(0, 4)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_slot_mapping_equals_the_definition_for_every_range(block_size: int) -> None:
    block_ids = [7, 2, 9, 4, 0]
    capacity = len(block_ids) * block_size
    slots = [block_ids[t // block_size] * block_size + t % block_size for t in range(capacity)]
    for start in range(0, capacity + 1, 3):
        for stop in range(start, capacity + 1):
            found = slot_mapping(block_ids, start, stop, block_size)
            assert found.dtype == np.int64
            assert found.tolist() == slots[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9)])
def test_slot_mapping_refuses_positions_without_a_block(start: int, stop: int) -> None:
    with pytest.raises(InvalidArgumentError, match="allocate first"):
        slot_mapping([0, 1], start, stop, 4)


def test_slots_exceed_32_bits() -> None:
    assert slot_mapping([2**31 - 1], 0, 1, 256).tolist() == [(2**31 - 1) * 256]


def test_a_growing_list_is_appended_to() -> None:
    tables = BlockTables(2, 4)
    block_ids = [5, 6]
    tables.update(1, block_ids)
    tables.table[1, :2] = -1  # an append must not touch what is there
    block_ids.append(7)
    tables.update(1, block_ids)
    tables.update(1, block_ids)
    assert tables.table[1].tolist() == [-1, -1, 7, 0]
    assert tables.length(1) == 3


def test_another_list_replaces_the_row_without_being_told() -> None:
    tables = BlockTables(1, 4)
    tables.update(0, [1, 2, 3])
    tables.update(0, [9, 8, 7, 6])
    assert tables.table[0].tolist() == [9, 8, 7, 6]
    tables.update(0, [4])
    assert tables.length(0) == 1
    assert tables.rows([0], 1).tolist() == [[4]]


def test_a_list_that_shrank_in_place_is_noticed() -> None:
    tables = BlockTables(1, 4)
    block_ids = [1, 2, 3]
    tables.update(0, block_ids)
    del block_ids[1:]
    tables.update(0, block_ids)
    assert tables.length(0) == 1


def test_rewrite_and_release() -> None:
    tables = BlockTables(1, 4)
    block_ids = [1, 2, 3]
    tables.update(0, block_ids)
    block_ids[1] = 8
    tables.rewrite(0, block_ids)
    assert tables.table[0, :3].tolist() == [1, 8, 3]
    tables.release(0)
    assert tables.length(0) == 0
    block_ids[0] = 5
    tables.update(0, block_ids)
    assert tables.table[0, :3].tolist() == [5, 8, 3]


def test_rows_are_gathered_into_a_new_contiguous_array() -> None:
    tables = BlockTables(3, 4)
    for row in range(3):
        tables.update(row, [10 * row, 10 * row + 1])
    gathered = tables.rows(np.array([2, 0]), 2)
    assert gathered.tolist() == [[20, 21], [0, 1]]
    assert gathered.dtype == np.int32
    assert gathered.flags.c_contiguous
    gathered[:] = -1
    assert tables.table[2, 0] == 20


def test_too_many_blocks_for_a_row_are_refused() -> None:
    tables = BlockTables(1, 2)
    with pytest.raises(InvalidArgumentError, match="max_blocks = 2"):
        tables.update(0, [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="max_blocks = 2"):
        tables.rows([0], 3)
    assert tables.length(0) == 0
