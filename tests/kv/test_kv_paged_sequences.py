"""The library face: alloc, update and free by name."""

import runpy
from pathlib import Path
from typing import Any

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
    assert "fourth and fifth\n [[0 2]\n [0 2]]" in output
    assert "make the pool larger" in output


def test_a_cut_gives_blocks_back_and_continues_there() -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    sequences.alloc("a", list(range(11)))
    assert sequences.truncate("a", 8) == []
    assert sequences.stats().num_referenced == 2
    assert (sequences.num_tokens("a"), sequences.update("a", [99]).slots.tolist()) == (8, [8])
    assert sequences.truncate("a", 0) == []
    assert sequences.stats().num_referenced == 0
    assert sequences.update("a", [5, 6]).positions.tolist() == [0, 1]
    sequences.manager.check_invariants()


@pytest.mark.parametrize("share", ["fork", "prefix cache"])
def test_a_cut_into_a_block_that_others_can_read_copies_it(share: str) -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    sequences.alloc("a", list(range(8)))
    sequences.commit("a")
    if share == "fork":
        sequences.fork("a", "b")
    [(source, destination)] = sequences.truncate("a", 6)
    assert (source, sequences.block_table(["a"])[0].tolist()) == (1, [[0, destination]])
    assert sequences.update("a", [66]).slots.tolist() == [destination * 4 + 2]
    # The whole block can still be hit, by a prompt that equals the old contents.
    assert sequences.alloc("c", [*range(8), 8]).start == 8
    sequences.manager.check_invariants()


def test_a_cut_into_a_block_of_its_own_copies_nothing() -> None:
    sequences = PagedSequences(num_blocks=2, block_size=4)
    sequences.alloc("a", [1, 2, 3])
    assert sequences.update("a", [4, 5, 6]).slots.tolist() == [3, 4, 5]
    # The drafts 4, 5 and 6 are refused before anyone could share them.
    assert sequences.truncate("a", 3) == []
    assert sequences.update("a", [7]).slots.tolist() == [3]


@pytest.mark.parametrize("token_ids", ["ab", [1.5], [2**31], [None], 5])
def test_what_is_no_token_changes_nothing(token_ids: Any) -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    sequences.alloc("a", [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="token ids must be integers"):
        sequences.update("a", token_ids)
    with pytest.raises(InvalidArgumentError, match="token ids must be integers"):
        sequences.alloc("b", token_ids)
    assert "b" not in sequences
    assert sequences.update("a", [4, 5]).slots.tolist() == [3, 4]
    sequences.manager.check_invariants()


@pytest.mark.parametrize("num_tokens", [1.5, "1"])
def test_cuts_are_integers(num_tokens: Any) -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    sequences.alloc("a", [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="num_tokens must be an integer"):
        sequences.truncate("a", num_tokens)
    with pytest.raises(InvalidArgumentError, match="num_tokens must be an integer"):
        sequences.fork("a", "b", num_tokens)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2.5, 4), ("4", 4), (4, None)])
def test_sizes_are_positive_integers(sizes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected integers num_blocks >= 1"):
        PagedSequences(*sizes)


def test_integers_of_numpy_will_do() -> None:
    sequences = PagedSequences(*np.array([4, 4]))
    sequences.alloc("a", np.arange(6))
    sequences.fork("a", "b", np.int32(5))
    assert sequences.num_tokens("b") == 5


def test_a_salt_is_bytes() -> None:
    with pytest.raises(InvalidArgumentError, match="salt must be bytes, got 'tenant'"):
        PagedSequences(4, 4).alloc("a", [1], salt="tenant")  # type: ignore[arg-type]


def test_a_refused_cut_changes_nothing() -> None:
    sequences = PagedSequences(num_blocks=2, block_size=4)
    sequences.alloc("a", list(range(8)))
    sequences.fork("a", "b")
    with pytest.raises(OutOfBlocksError, match="Nothing was allocated"):
        sequences.truncate("a", 7)
    assert sequences.num_tokens("a") == 8
    for num_tokens in (-1, 9):
        with pytest.raises(InvalidArgumentError, match="has 8 tokens"):
            sequences.truncate("a", num_tokens)
    assert sequences.truncate("a", 4) == []
    sequences.manager.check_invariants()


def test_forks_may_branch_off_anywhere() -> None:
    sequences = PagedSequences(num_blocks=6, block_size=4)
    sequences.alloc("a", list(range(10)))
    assert sequences.fork("a", "edge", 8) == []
    assert sequences.fork("a", "inside", 5) == [(1, 3)]
    assert sequences.block_table(["edge", "inside"])[0].tolist() == [[0, 1], [0, 3]]
    assert sequences.update("inside", [55]).positions.tolist() == [5]
    with pytest.raises(InvalidArgumentError, match=r"0 \.\. 10 tokens"):
        sequences.fork("a", "beyond", 11)
    assert "beyond" not in sequences


def test_equal_sequences_join_block_by_block() -> None:
    """Two that were computed side by side, and two forks that went on with the same tokens."""
    sequences = PagedSequences(num_blocks=12, block_size=2)
    for name in "ab":
        sequences.alloc(name, [1, 2, 3, 4, 5])
    assert sequences.stats().num_referenced == 6
    for name in "ab":
        sequences.commit(name)
    assert sequences.stats().num_referenced == 4  # two shared, and a partial block each
    sequences.fork("a", "c")
    for name in "abc":
        sequences.update(name, [6])
        sequences.commit(name)
    assert sequences.block_table(["a", "b", "c"])[0].tolist() == [[0, 1, 2]] * 3
    sequences.manager.check_invariants()


def test_equal_blocks_behind_different_tokens_do_not_join() -> None:
    """Keys and values depend on all tokens before them."""
    sequences = PagedSequences(num_blocks=4, block_size=2)
    sequences.alloc("a", [1, 2, 7, 8])
    sequences.alloc("b", [3, 4, 7, 8])
    sequences.commit("a")
    sequences.commit("b")
    assert sequences.stats().num_shared == 0


def test_figures_in_bytes() -> None:
    sequences = PagedSequences(num_blocks=8, block_size=4, bytes_per_block=400)
    sequences.alloc("a", list(range(9)))
    sequences.fork("a", "b")
    stats = sequences.stats()
    assert (stats.num_table_entries, stats.num_referenced, stats.num_shared) == (6, 4, 2)
    assert (stats.reserved_unfilled_tokens, stats.reserved_unfilled_bytes) == (6, 600)
    assert (stats.referenced_bytes, stats.shared_bytes, stats.saved_bytes) == (1600, 800, 800)
    sequences.free("a")
    sequences.free("b")
    stats = sequences.stats()
    assert (stats.cached_bytes, stats.free_bytes, stats.reserved_unfilled_bytes) == (800, 2400, 0)


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8])
def test_trap_b_no_block_is_reserved_at_a_block_edge(num_tokens: int) -> None:
    sequences = PagedSequences(num_blocks=4, block_size=4)
    sequences.alloc("a", list(range(num_tokens)))
    assert sequences.stats().num_referenced == -(-num_tokens // 4)
    assert sequences.stats().reserved_unfilled_tokens == -num_tokens % 4
    assert sequences.update("a", [9]).slots.tolist() == [num_tokens]
    assert sequences.truncate("a", num_tokens) == []
    assert sequences.stats().num_referenced == -(-num_tokens // 4)
