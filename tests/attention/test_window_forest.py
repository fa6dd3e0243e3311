"""Plans for windows: each visible key once, nothing else read, unseen entries of tables not compared."""

import numpy as np
import pytest
import torch
from attention_cases import ALWAYS_SHARE, hide_unseen, make_case, with_bfloat16_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_forest import forests, pairs_of
from test_node_plan import TILING
from test_node_plan import forests as bushy_forests

from octavo.attention import ForestPlan
from octavo.attention.plan.node_plan import NodePlan
from octavo.attention.plan.prefix_forest import Costs
from octavo.errors import InvalidArgumentError

WINDOWS = st.sampled_from([1, 2, 5, 16, 17, 50, 1000, 2**63 - 1])


@st.composite
def tangles(draw):
    """Rows that meet and part at any column, as no cache makes them."""
    block_size, num_rows = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 7))
    rows = [draw(st.lists(st.integers(0, 3), max_size=9)) for _ in range(num_rows)]
    seq_lens = [max(0, len(row) * block_size - draw(st.integers(0, block_size - 1))) for row in rows]
    query_lens = [min(n, draw(st.integers(0, 5))) for n in seq_lens]
    return rows, seq_lens, query_lens, block_size


def arrays_of(case):
    metadata = case.metadata
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    return (*(getattr(metadata, name).numpy() for name in names), case.k_cache.shape[1])


def first_seen(case, window):
    """The first key that each sequence's queries see."""
    _, lens, bounds, _ = arrays_of(case)
    return np.maximum(0, lens.astype(np.int64) - np.diff(bounds) - window + 1)


def check_host_plan(plan, case, window):
    """Each key that a token sees lies in one item, from the root down, under the token's own block."""
    table, _, bounds, block_size = arrays_of(case)
    sequence = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    first, position = first_seen(case, window), case.metadata.positions.numpy()
    keys, readers = [[] for _ in sequence], [set() for _ in range(plan.num_items)]
    for item, _, token in pairs_of(plan):
        begin, end = int(plan.item_kv_begin[item]), int(plan.item_kv_end[item])
        row, own = int(plan.item_table_row[item]), sequence[token]
        seen = np.arange(max(begin, first[own]), end)
        assert (table[row, seen // block_size] == table[own, seen // block_size]).all()
        assert row == own or first[row] // block_size * block_size <= begin
        keys[token] += range(begin, end)
        readers[item].add(own)
    for token, covered in enumerate(keys):
        visible = range(max(0, int(position[token]) - window + 1), int(position[token]) + 1)
        assert [key for key in covered if key in visible] == list(visible)
    for item, members in enumerate(readers):
        assert plan.item_kv_end[item] > min(first[list(members)], default=0), "nobody sees it"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(forests() | tangles(), WINDOWS, st.sampled_from([2, 64]), st.integers(0, 9))
def test_random_forests_with_windows(forest, window, tile_tokens, seed):
    rows, seq_lens, query_lens, block_size = forest
    case = make_case(seq_lens, query_lens, block_size=block_size, head_dim=8, rows=rows)
    case = hide_unseen(case, window, seed)
    plan = case.forest(Costs(0.0, 0.0, tile_tokens), split_tokens=64, window=window)
    check_host_plan(plan, case, window)
    options = {"window": window, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0}
    expected, expected_lse = case.run("reference", **options)
    assert not expected.isnan().any()
    rounded = with_bfloat16_cache(case)
    of_rounded, _ = rounded.run("reference", **options)
    for impl in ("torch", "c"):
        for chosen in (plan, None):
            torch.testing.assert_close(
                rounded.run(impl, chosen, **options)[0], of_rounded, rtol=1e-5, atol=2e-6
            )
            out, lse = case.run(impl, chosen, **options)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=2e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(bushy_forests() | tangles(), WINDOWS, st.integers(0, 9), st.sampled_from([0.0, 1.5]))
def test_random_forests_of_a_gpu_with_windows(forest, window, seed, partial_tokens):
    """Nodes and the rest of each token's keys are all that it sees, once, through its own blocks."""
    rows, seq_lens, query_lens, block_size = forest
    rows = [row[: -(-n // block_size)] for row, n in zip(rows, seq_lens, strict=True)]
    case = make_case(seq_lens, query_lens, rows=rows, block_size=block_size, head_dim=1, kv_heads=1, heads=1)
    case = hide_unseen(case, window, seed)
    table, _, bounds, _ = arrays_of(case)
    plan = NodePlan.from_block_tables(
        *arrays_of(case), tiling=TILING, costs=Costs(partial_tokens, 0.0), window=window
    )
    sequence = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    first, position = first_seen(case, window), case.metadata.positions.numpy()
    keys = {}
    for entries, begin, count, kv_begin, kv_end, *seen_by_all, planned_begin in np.concatenate(
        [plan.thin_units, plan.fat_units]
    ).tolist():
        assert planned_begin == kv_begin
        assert seen_by_all == [kv_begin, kv_end]
        assert kv_begin % TILING.align_tokens == kv_end % TILING.align_tokens == 0
        for entry in range(begin, begin + count):
            token = int(plan.tokens[entry])
            own = sequence[token]
            seen = np.arange(max(kv_begin, first[own]), kv_end)
            ids = plan.block_ids[entries + seen // block_size]
            assert (ids == table[own, seen // block_size]).all()
            keys[int(plan.partial_ids[entry])] = range(kv_begin, kv_end)
    for token, s in enumerate(sequence):
        partials = range(plan.merge_begin[token], plan.merge_begin[token + 1])
        covered = [key for partial in partials for key in keys[partial]]
        covered += range(int(plan.leaf_begin[s]), int(position[token]) + 1)
        visible = range(max(0, int(position[token]) - window + 1), int(position[token]) + 1)
        assert [key for key in covered if key in visible] == list(visible)


def long_prefix(own_tokens, prefix=32768, block_size=16):
    """Sequences behind one prefix, each with so many tokens of its own."""
    shared, rows, at = list(range(prefix // block_size)), [], prefix
    for num in own_tokens:
        num_own = -(-num // block_size)
        rows.append(np.array([*shared, *range(at, at + num_own)], dtype=np.int32))
        at += num_own
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    lens = np.array([prefix + num for num in own_tokens])
    return table, lens, np.arange(len(rows) + 1), block_size


def test_work_is_only_over_keys_that_a_window_shows():
    """Behind a prefix of 32,768 tokens: an item over what the window still shows of it, and the leaves."""
    step = long_prefix([10 + s % 5 for s in range(64)])
    plan = ForestPlan.from_block_tables(*step, window=128)
    assert plan.num_items == 1 + 64
    assert plan.item_kv_begin.min() == 32768 - 128
    assert plan.sharing.num_nodes == 1
    flat = ForestPlan.flat(*step[1:3], window=128)
    assert (flat.item_kv_end - flat.item_kv_begin == 128).all()
    assert flat.num_items == 64


def test_a_node_goes_when_windows_have_passed_it():
    """All see it; some; one, whose own it becomes; none."""
    for grown, num_readers in ((0, 4), (60, 3), (115, 1), (300, 1)):
        step = long_prefix([1 + grown, 17 + grown, 40 + grown, 70 + grown], prefix=512)
        plan = ForestPlan.from_block_tables(*step, costs=ALWAYS_SHARE, window=128)
        sizes = np.diff(plan.item_token_begin)
        assert plan.sharing.num_nodes == (num_readers > 1)
        assert sizes.max() == num_readers
        if num_readers == 1:
            assert plan.item_kv_begin.tolist() == (step[1] - 128).tolist()


def test_sequences_whose_windows_begin_at_different_blocks_share():
    """Each compares only what it sees, and the earlier one knows what is before."""
    table = np.array([[9, 9, 1, 2, 3, 20], [9, 9, 9, 9, 3, 4], [9, 0, 1, 2, 3, 4]], dtype=np.int32)
    lens = np.array([5 * 16 + 1, 5 * 16 + 9, 4 * 16 + 15])
    lens[1] += 16
    table = np.hstack([table, [[0], [30], [0]]]).astype(np.int32)
    plan = ForestPlan.from_block_tables(table, lens, np.arange(4), 16, costs=ALWAYS_SHARE, window=40)
    shared = np.flatnonzero(np.diff(plan.item_token_begin) > 1)
    readers = [set(plan.item_tokens[slice(*plan.item_token_begin[i : i + 2])].tolist()) for i in shared]
    spans = [(int(plan.item_kv_begin[i]), int(plan.item_kv_end[i])) for i in shared]
    assert readers == [{0, 2}, {0, 1}], "token 2 ends within block 4, which is none of its full ones"
    assert spans == [(32, 64), (64, 80)]


def test_a_plan_for_a_window_is_refused_by_layers_that_see_more():
    case = make_case([70, 40], [1, 3])
    plan = case.forest(window=20)
    assert plan.window == 20
    for impl in ("torch", "c"):
        for window in (None, 21):
            with pytest.raises(InvalidArgumentError, match=f"the plan is for window=20.*window={window}"):
                case.run(impl, plan, window=window)
        torch.testing.assert_close(case.run(impl, plan, window=9), case.run(impl, window=9))
    for window in (0, -1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="window must be at least 1 token"):
            case.forest(window=window)
        with pytest.raises(InvalidArgumentError, match="window must be at least 1 token"):
            ForestPlan.flat([3], [0, 1], window=window)


@pytest.mark.parametrize("window", [1, 3, 100, 2**63 - 1])
@pytest.mark.parametrize("tile_tokens", [2, 64])
def test_windows_of_sequences_shorter_than_their_queries(window, tile_tokens):
    """The first tokens' positions are negative, and they see nothing."""
    lens, bounds = np.array([3, 0, 9]), np.array([0, 8, 10, 12])
    plan = ForestPlan.flat(lens, bounds, window=window, tile_tokens=tile_tokens, may_be_short=True)
    position = np.concatenate([np.arange(n - q, n) for n, q in zip(lens, np.diff(bounds), strict=True)])
    keys = [[] for _ in position]
    for item, _, token in pairs_of(plan):
        keys[token] += range(plan.item_kv_begin[item], plan.item_kv_end[item])
    for covered, at in zip(keys, position.tolist(), strict=True):
        visible = range(max(0, at - window + 1), at + 1)
        assert [key for key in covered if key in visible] == list(visible)
