"""Shared prefixes in the Triton kernels: forest = flat = float64, on random forests and stale plans."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_case
from fewer import fewer
from hypothesis import given, settings
from test_node_plan import forests
from triton_cases import HAS_GPU, assert_close, to_device
from triton_forest_cases import check, make_forest, make_map, run_shared, shared_case

from octavo.errors import InvalidArgumentError


@pytest.mark.parametrize("block_size", [16, 48, 64])
@fewer(("heads", "kv_heads"), [(6, 2), (2, 2), (12, 1), (16, 2)])
def test_decode(heads, kv_heads, block_size):
    check(shared_case(heads=heads, kv_heads=kv_heads, block_size=block_size))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("block", [20, 0], ids=["own key", "shared key"])
def test_a_key_that_is_no_number_shows(block):
    """As without a forest; the result of such a row must not be that of a row without keys."""
    case = shared_case()
    case.k_cache[block, 0] = torch.nan
    out, lse = run_shared(case, make_forest(case)[0])
    # Blocks 0 to 5 are the root of four sequences, block 20 is of the first one.
    meets = [True, block == 0, block == 0, block == 0, False]
    assert out.isnan().flatten(1).all(1).tolist() == meets
    assert lse.isnan().all(1).tolist() == meets


@pytest.mark.parametrize("query_lens", [[3, 1, 2, 1, 1], [3, 18, 1, 7, 2], [1, 0, 3, 0, 1]])
def test_extend(query_lens):
    check(shared_case(query_lens, heads=8))


@fewer("right", [2, None])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1, 1], [3, 18, 1, 7, 2]])
def test_keys_after_the_query(query_lens, right):
    """They are in leaves; nodes see shifted positions, and bias by the true ones."""
    check(shared_case(query_lens), right=right)
    check(shared_case(query_lens), right=right, alibi_slopes=torch.tensor([0.5, 0.25, 0.02, 0.1]))


def test_first_keys_and_shared_ones_are_refused():
    case = shared_case()
    forest, _ = make_forest(case)
    begin = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="sequences with kv_begin cannot share keys"):
        replace(case.metadata, work=forest, kv_begin=begin)


def test_extend_with_keys_in_parts(monkeypatch):
    """Few tiles on many multiprocessors: only the first part of a tile's keys begins with its ancestors."""
    monkeypatch.setattr("octavo.attention.tilings.step_tiles.num_multiprocessors", lambda device: 24)
    monkeypatch.setattr("octavo.attention.tilings.step_tiles._MIN_SPLIT_KEYS", 32)
    case = shared_case([3, 18, 1, 7, 2])
    assert make_map(to_device(case)).prefill.num_parts > 1
    check(case)


def test_many_sequences_fill_fat_tiles():
    rows = [[*range(4), 100 + i] for i in range(33)]
    case = make_case([70] * 33, [1] * 33, rows=rows, block_size=16, heads=4)
    forest, plan = make_forest(case)
    assert plan.fat_units.shape[0] > 0
    assert plan.thin_units.shape[0] == 0
    assert_close(case, run_shared(case, forest))


@pytest.mark.parametrize("head_dim", [8, 80, 128])
def test_any_head_dim(head_dim):
    check(shared_case(head_dim=head_dim))


def test_sinks():
    """They join once, not with each node."""
    check(shared_case(), sinks=torch.tensor([0.5, -3.0, 4.0, -torch.inf]))


def test_softcap_and_alibi():
    check(shared_case(), softcap=2.0)
    check(shared_case(), alibi_slopes=torch.tensor([0.5, 0.25, 0.02, 0.1]))


@given(forests())
@settings(max_examples=15, deadline=None)
def test_random_forests(forest):
    *lists, block_size = forest
    # The interpreter takes a second for a few rows.
    rows, seq_lens, query_lens = (items if HAS_GPU else items[:8] for items in lists)
    rows = [row[: -(-n // block_size)] for row, n in zip(rows, seq_lens, strict=True)]
    case = make_case(seq_lens, query_lens, rows=rows, block_size=block_size)
    if case.q.shape[0]:
        assert_close(case, run_shared(case, make_forest(case)[0]))
