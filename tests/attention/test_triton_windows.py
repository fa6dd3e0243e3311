"""Windows in the Triton kernels, over caches that keep only what windows show: forest = flat = float64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import hide_unseen, make_case
from fewer import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_node_plan import forests
from triton_cases import DEVICE, HAS_GPU, assert_close, run, to_device
from triton_forest_cases import check_window, make_forest, run_shared, shared_case

from octavo.attention import forest_attention, gpu_paged
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton import nodes as triton_nodes
from octavo.errors import InvalidArgumentError


@fewer("window", [60, 40, 61, 100, 10**12])
@pytest.mark.parametrize("query_lens", [[1] * 5, [3, 18, 1, 7, 2], [1, 0, 3, 0, 1]])
def test_nodes_show_what_windows_do(query_lens, window):
    check_window(shared_case(query_lens), window, must_share=0 not in query_lens)


@fewer(("block_size", "heads", "kv_heads"), [(48, 6, 2), (64, 12, 1), (16, 16, 2)])
def test_windows_of_other_shapes(block_size, heads, kv_heads):
    check_window(shared_case(block_size=block_size, heads=heads, kv_heads=kv_heads), 4 * block_size - 5)


@fewer(
    "options",
    [
        {"sinks": torch.tensor([0.5, -3.0, 4.0, -torch.inf])},
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.02, 0.1])},
        {"right": 2},
        {"right": None, "alibi_slopes": torch.tensor([0.5, 0.25, 0.02, 0.1])},
    ],
)
@pytest.mark.parametrize("query_lens", [[1] * 5, [3, 18, 1, 7, 2]])
def test_windows_with_options(query_lens, options):
    check_window(shared_case(query_lens), 60, **options)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_windows_of_any_head_dim(head_dim):
    check_window(shared_case(head_dim=head_dim), 60)


def test_a_window_cuts_fat_tiles():
    lens = [8 * 16 + 1 + i % 30 for i in range(33)]
    rows = [[*range(8), 100 + 2 * i, 101 + 2 * i][: -(-n // 16)] for i, n in enumerate(lens)]
    case = make_case(lens, [1] * 33, rows=rows, heads=4)
    plan = make_forest(hide_unseen(case, 50), window=50)[1]
    assert plan.fat_units.shape[0] > 0
    assert plan.fat_units[:, 3].min() == 64, "the first sequence sees from key 79 on"
    check_window(case, 50)


@given(forests(), st.sampled_from([1, 5, 16, 40, 90]), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_random_forests_with_windows(forest, window, seed):
    *lists, block_size = forest
    # The interpreter takes a second for a few rows.
    rows, seq_lens, query_lens = (items if HAS_GPU else items[:8] for items in lists)
    rows = [row[: -(-n // block_size)] for row, n in zip(rows, seq_lens, strict=True)]
    case = make_case(seq_lens, query_lens, rows=rows, block_size=block_size)
    if case.q.shape[0]:
        check_window(case, window, seed=seed, must_share=False)


def grown_case(grown, ended=()):
    """Four sequences behind 8 blocks, after some more steps; those that have ended have length 0."""
    lens = [0 if i in ended else 8 * 16 + own + grown for i, own in enumerate((1, 9, 20, 44))]
    rows = [[*range(8), *range(10 + 9 * i, 19 + 9 * i)][: -(-n // 16)] for i, n in enumerate(lens)]
    case = make_case(lens, [0 if n == 0 else 1 for n in lens], rows=rows)
    metadata = case.metadata
    q = torch.randn(4, *case.q.shape[1:])
    positions = metadata.seq_lens - 1
    # As in a captured step: a row for each sequence, of padding where it has ended.
    positions[metadata.seq_lens == 0] = 0
    metadata = replace(
        metadata, cu_seqlens_q=torch.arange(5).int(), positions=positions, slot_mapping=torch.full((4,), -1),
        max_query_len=1,
    )  # fmt: skip
    return replace(case, q=q, metadata=metadata)


@pytest.mark.parametrize("ended", [(), (0,), (0, 2), (1, 2, 3)])
@fewer("grown", [20, 0, 45, 70, 90])
def test_a_plan_outlives_what_its_windows_leave_behind(grown, ended):
    """Windows have moved on, blocks that no window shows hold NaN, and some sequences have ended."""
    forest, plan = make_forest(grown_case(0), window=70)
    assert plan.num_units > 0
    case = hide_unseen(grown_case(grown, ended), 70)
    out, lse = run_shared(case, forest, window=70)
    assert_close(case, (out, lse), window=70)
    assert all((lse[s] == -torch.inf).all() for s in ended)
    # A step of all of them may follow: what it sees does not depend on the step before.
    again = hide_unseen(grown_case(0), 70)
    assert_close(again, run_shared(again, forest, window=70), window=70)


@pytest.mark.parametrize("window", [None, 59, 61])
def test_a_forest_of_another_window_is_not_read(window):
    """It says why, and the layer reads per sequence."""
    case = shared_case()
    forest, _ = make_forest(case, window=60)
    assert forest.unsupported_reason(60) is None
    assert forest.unsupported_reason(window) == (
        f"the forest's nodes are cut for window=60, these layers have window={window}"
    )
    expected = run_shared(case, None, window=window)
    actual = run_shared(case, forest, window=window)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert forest.partial_lse.isnan().all()


def test_a_forests_window_is_a_number_of_tokens():
    for window in (0, -1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="window must be at least 1 token"):
            make_forest(shared_case(), window=window)


@pytest.mark.parametrize("query_lens", [[1] * 5, [3, 18, 1, 7, 2]])
def test_sequences_read_nothing_that_no_window_shows(query_lens):
    """Without a forest, by a map of each kind."""
    case = hide_unseen(shared_case(query_lens), 33)
    assert_close(case, run(case, window=33), window=33)
    assert_close(case, run(case, window=33, num_splits=3), window=33)
    if len(set(query_lens)) > 1:
        return
    moved = to_device(case)
    out, lse = gpu_paged.uniform_attention_with_lse(
        moved.q, moved.cache, moved.metadata.seq_lens, moved.metadata.block_table, ScoreOptions(0.25, 33),
        query_len=1, max_seq_len=case.metadata.max_seq_len,
    )  # fmt: skip
    assert_close(case, (out.cpu(), lse.cpu()), window=33)


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_windows_share_in_one_call(impl, monkeypatch):
    """forest_attention, with sinks, over tables whose first blocks are gone."""
    monkeypatch.setattr("octavo.attention.plan.device_forest._LAUNCH_BYTES", 0)
    rows = [[*range(8), 10 + 2 * i, 11 + 2 * i] for i in range(12)]
    case = hide_unseen(make_case([160 - i for i in range(12)], [1] * 11 + [3], rows=rows), 90)
    moved, sinks, launched = to_device(case), torch.tensor([0.5, -3.0, 4.0, 1.0]), []
    attend = triton_nodes.attend_thin_nodes
    monkeypatch.setattr(triton_nodes, "attend_thin_nodes", lambda *a: launched.append(attend(*a)))
    arrays = (case.metadata.block_table, case.metadata.seq_lens, case.metadata.cu_seqlens_q)
    options = {"scale": 0.25, "window": 90, "softcap": 3.0}
    out = forest_attention(
        *(moved.q, moved.cache, *(array.numpy() for array in arrays)),
        **options, sinks=sinks.to(DEVICE), impl=impl,
    )  # fmt: skip
    exact, _ = case.oracle(**options, sinks=sinks)
    assert (out.cpu() - exact).abs().max() < 1e-5
    assert len(launched) == (impl == "triton")
