"""The library face: alloc, update and free by name."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import InvalidArgumentError, OutOfBlocksError
from octavo.kv import Extension, PagedSequences


def test_alloc_update_free() -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    first = sequences.alloc("a", [1, 2, 3, 4, 5])
    assert isinstance(first, Extension)
    assert first.positions.tolist() == [0, 1, 2, 3, 4]
    assert first.slots.tolist() == [0, 1, 2, 3, 4]
    second = sequences.update("a", [6])
    assert (second.start, second.slots.tolist()) == (5, [5])
    assert "a" in sequences
    sequences.free("a")
    assert "a" not in sequences
    assert sequences.manager.num_free_blocks == 4
    sequences.manager.check_invariants()


def test_trap_d_updates_cross_block_edges() -> None:
    sequences = PagedSequences(num_blocks=8, block_size=2)
    sequences.alloc("other", [90])
    sequences.alloc("a", [1])
    extension = sequences.update("a", [2, 3, 4, 5, 6])
    table, lengths = sequences.block_table(["a"])
    assert lengths.tolist() == [6]
    expected = [table[0, t // 2] * 2 + t % 2 for t in range(1, 6)]
    assert extension.slots.tolist() == expected
    assert extension.positions.tolist() == [1, 2, 3, 4, 5]


def test_trap_d_running_out_of_blocks_leaks_nothing() -> None:
    sequences = PagedSequences(num_blocks=3, block_size=2)
    sequences.alloc("a", [1, 2, 3])
    before = sequences.manager.stats()
    with pytest.raises(OutOfBlocksError, match="free a sequence"):
        sequences.alloc("b", [7, 8, 9])
    with pytest.raises(OutOfBlocksError, match="make the pool larger"):
        sequences.alloc("b", list(range(7)))
    assert "b" not in sequences
    assert sequences.manager.stats().num_referenced == before.num_referenced
    with pytest.raises(OutOfBlocksError):
        sequences.update("a", [4, 5, 6, 7])
    assert sequences.update("a", [4, 5, 6]).positions.tolist() == [3, 4, 5]
    sequences.manager.check_invariants()
    with pytest.raises(OutOfBlocksError):
        sequences.alloc("a prefix hit that does not fit", [1, 2, 9])
    assert sequences.manager.stats().num_shared == 0
    sequences.manager.check_invariants()


def test_trap_d_tables_are_registered_and_padded() -> None:
    sequences = PagedSequences(num_blocks=8, block_size=2)
    sequences.alloc("a", [1, 2, 3])
    sequences.alloc("b", [9])
    table, lengths = sequences.block_table(["b", "a"])
    assert table.dtype == lengths.dtype == np.int32
    assert table.tolist() == [[2, 0], [0, 1]]
    assert lengths.tolist() == [1, 3]


def test_equal_prefixes_are_shared_once_they_are_committed() -> None:
    sequences = PagedSequences(num_blocks=8, block_size=2)
    sequences.alloc("a", [1, 2, 3])
    assert sequences.alloc("too early", [1, 2, 3]).start == 0
    sequences.commit("a")
    assert sequences.alloc("b", [1, 2, 3]).start == 2
    assert sequences.alloc("salted", [1, 2, 3], salt=b"tenant").start == 0
    sequences.manager.check_invariants()


def test_fork_shares_and_copies() -> None:
    sequences = PagedSequences(num_blocks=4, block_size=2)
    sequences.alloc("a", [1, 2, 3])
    assert sequences.fork("a", "b") == [(1, 2)]
    table, lengths = sequences.block_table(["a", "b"])
    assert table.tolist() == [[0, 1], [0, 2]]
    assert lengths.tolist() == [3, 3]
    sequences.fork("a", "c")
    with pytest.raises(OutOfBlocksError):
        sequences.fork("a", "d")
    assert "d" not in sequences


def test_names_are_checked() -> None:
    sequences = PagedSequences(num_blocks=4, block_size=2)
    sequences.alloc("a", np.array([1, 2, 3]))
    with pytest.raises(InvalidArgumentError, match="'a' exists"):
        sequences.alloc("a", [1])
    with pytest.raises(InvalidArgumentError, match="'a' exists"):
        sequences.fork("a", "a")
    with pytest.raises(InvalidArgumentError, match="no sequence 'b'"):
        sequences.update("b", [1])
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        sequences.alloc("b", [])


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "kv_library.py"))
    output = capsys.readouterr().out
    assert "second: only [4, 5, 6]" in output
    assert "make the pool larger" in output
