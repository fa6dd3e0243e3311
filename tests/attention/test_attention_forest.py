"""The work list: every (token, key) pair exactly once, whatever is shared; forest = flat = reference."""

import numpy as np
import pytest
import torch
from attention_cases import ALWAYS_SHARE, assert_accurate, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import ForestPlan
from octavo.attention.plan.prefix_forest import Costs

SPLITS = (8, 64, 512)


def pairs_of(plan):
    """All (token, key) pairs of a plan, each item's tokens x its segment."""
    for item in range(plan.num_items):
        begin, end = plan.item_token_begin[item : item + 2]
        for at in range(begin, end):
            yield item, at, int(plan.item_tokens[at])


def check_invariants(plan, table, seq_lens, query_lens, block_size):
    """Each visible key of each token lies in exactly one item, under the token's own blocks."""
    sequence = np.repeat(np.arange(len(seq_lens)), query_lens)
    position = np.concatenate([np.arange(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)] + [[]])
    covered = [[] for _ in sequence]
    partials = [[] for _ in sequence]
    for item, at, token in pairs_of(plan):
        begin, end = int(plan.item_kv_begin[item]), int(plan.item_kv_end[item])
        row, own = int(plan.item_table_row[item]), sequence[token]
        assert end <= seq_lens[row]
        if row != own:
            blocks = slice(begin // block_size, -(-end // block_size))
            assert (table[row, blocks] == table[own, blocks]).all()
            assert end <= position[token]
        covered[token] += list(range(begin, end))
        partials[token].append(int(plan.item_partial_ids[at]))
    for token, keys in enumerate(covered):
        visible = [key for key in keys if key <= position[token]]
        assert visible == list(range(int(position[token]) + 1)), "each key once, from the root to the leaf"
        first, last = plan.merge_begin[token : token + 2]
        expected = [-1] if first == last else list(range(first, last))
        assert partials[token] == expected
    assert plan.num_partials == plan.merge_begin[-1]
    assert sorted(plan.item_order) == list(range(plan.num_items))
    assert plan.kv_tokens_read == int((plan.item_kv_end - plan.item_kv_begin).sum())


def flat_reads(plan, tile_tokens=64):
    """Tokens of KV read without sharing: a tile of a sequence's queries reads up to its last query's key."""
    total = 0
    for seq_len, query_len in zip(plan.lengths.seq_lens, plan.lengths.query_lens, strict=True):
        ends = [*range(tile_tokens, query_len, tile_tokens), query_len] if query_len else []
        total += sum(int(seq_len - query_len) + end for end in ends)
    return total


@st.composite
def forests(draw):
    """Random trees of depth 0..6 with ragged leaves: rows of block ids, lengths and query lengths."""
    ids = iter(range(10_000))
    rows, block_size = [], draw(st.sampled_from([1, 3, 4, 16]))

    def grow(prefix, depth):
        node = prefix + [next(ids) for _ in range(draw(st.integers(0, 3)))]
        rows.append(node)
        for _ in range(draw(st.integers(0, 3)) if depth < 6 and len(rows) < 12 else 0):
            grow(node, depth + 1)

    for _ in range(draw(st.integers(1, 3))):
        grow([], 0)
    rows = draw(st.permutations(rows))
    seq_lens = [max(0, len(row) * block_size - draw(st.integers(0, block_size - 1))) for row in rows]
    query_lens = [min(n, draw(st.integers(0, 5))) for n in seq_lens]
    return rows, seq_lens, query_lens, block_size


@settings(max_examples=40, deadline=None, derandomize=True)
@given(forests(), st.sampled_from(SPLITS), st.sampled_from([2, 64]))
def test_random_forests(forest, split_tokens, tile_tokens):
    rows, seq_lens, query_lens, block_size = forest
    case = make_case(seq_lens, query_lens, block_size=block_size, head_dim=8, rows=rows)
    table = case.metadata.block_table.numpy()
    costs = Costs(partial_tokens=0.0, node_tokens=0.0, tile_tokens=tile_tokens)
    plan = case.forest(costs, split_tokens=split_tokens)
    check_invariants(plan, table, seq_lens, query_lens, block_size)
    assert plan.kv_tokens_read <= flat_reads(plan, tile_tokens)
    expected, expected_lse = case.run("reference")
    for impl in ("torch", "c"):
        for chosen in (plan, None):
            out, lse = case.run(impl, chosen)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=2e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(forests(), st.floats(0, 4), st.floats(0, 40))
def test_any_costs_give_a_complete_plan(forest, partial_tokens, node_tokens):
    rows, seq_lens, query_lens, block_size = forest
    case = make_case(seq_lens, query_lens, block_size=block_size, head_dim=1, kv_heads=1, heads=1, rows=rows)
    plan = case.forest(Costs(partial_tokens, node_tokens), split_tokens=16)
    check_invariants(plan, case.metadata.block_table.numpy(), seq_lens, query_lens, block_size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 90)), min_size=1, max_size=6),
    st.sampled_from(SPLITS),
)
def test_flat_plans_are_complete(lengths, split_tokens):
    seq_lens = np.array([computed + new for computed, new in lengths])
    query_lens = np.array([new for _, new in lengths])
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)])
    plan = ForestPlan.flat(seq_lens, cu_seqlens_q, tile_tokens=32, split_tokens=split_tokens)
    table = np.arange(len(lengths) * 300).reshape(len(lengths), 300)
    check_invariants(plan, table, seq_lens, query_lens, 1)
    assert plan.kv_tokens_read == flat_reads(plan, tile_tokens=32)


def two_levels(num_groups=3, members=8, block_size=16):
    """Groups of sequences: 6 blocks shared by all, 4 by the group, 1 own."""
    rows = [
        [*range(6), *(1000 + 10 * g + i for i in range(4)), 5000 + g * members + m]
        for g in range(num_groups)
        for m in range(members)
    ]
    num = len(rows)
    return make_case([11 * block_size - 3] * num, [1] * num, rows=rows, block_size=block_size, head_dim=32)


@pytest.mark.parametrize("impl", ["torch", "c"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"softcap": 2.0}, {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.0])}]
)
def test_shared_prefixes_with_options(impl, options):
    case = two_levels()
    plan = case.forest()
    assert plan.num_partials == 3 * case.q.shape[0]
    assert_accurate(case, impl, plan, **options)


def test_shared_blocks_are_read_once():
    """Every query x every shared block is the trap; here 24 sequences read 6 + 3 * 4 shared blocks once."""
    plan = two_levels().forest()
    assert flat_reads(plan) == 24 * (11 * 16 - 3)
    assert plan.kv_tokens_read == (6 + 3 * 4) * 16 + 24 * 13
    assert plan.num_items == 1 + 3 + 24


def test_rows_in_any_order_share_the_same():
    rows = [[0, 1, 2, 10], [7, 8, 20], [0, 1, 2, 11], [7, 8, 21], [0, 1, 2, 12], [30, 31, 32]]
    case = make_case([4 * 16, 3 * 16, 4 * 16, 3 * 16, 4 * 16, 3 * 16], [1] * 6, rows=rows)
    plan = case.forest()
    shared = [(int(plan.item_kv_begin[i]), int(plan.item_kv_end[i])) for i in range(2)]
    assert sorted(shared) == [(0, 2 * 16), (0, 3 * 16)]
    assert_accurate(case, "c", plan)


def test_block_of_the_query_itself_is_never_shared():
    """Equal tables to the very last block, as after a fork: the block with the causal mask stays a leaf."""
    case = make_case([64, 64, 64], [1, 1, 20], rows=[[0, 1, 2, 3]] * 3)
    plan = case.forest()
    shared_ends = plan.item_kv_end[np.diff(plan.item_token_begin) > 20]
    assert shared_ends.tolist() == [32]
    assert_accurate(case, "c", plan)


@pytest.mark.parametrize("impl", ["torch", "c"])
def test_a_sequence_that_computes_what_others_share_is_no_member(impl):
    """Equal prompts in one step: the first computes all blocks, the second half of them, others read."""
    rows = [[*range(8), 10 + i] for i in range(5)]
    query_lens = [16 * 9, 16 * 5, 16, 3, 1]
    case = make_case([16 * 9] * 5, query_lens, rows=rows)
    plan = case.forest()
    check_invariants(plan, case.metadata.block_table.numpy(), [16 * 9] * 5, query_lens, 16)
    for begin, end in zip(plan.item_token_begin[:-1], plan.item_token_begin[1:], strict=True):
        is_first = plan.item_tokens[begin:end] < query_lens[0]
        assert is_first.all() or not is_first.any()
    assert plan.kv_tokens_read < flat_reads(plan)
    assert_accurate(case, impl, plan)


def test_a_prefix_too_short_to_pay_stays_with_its_children():
    """The common block alone is not promoted; the longer groups below it take it over."""
    rows = [
        [0, *range(10 + 20 * g, 26 + 20 * g), 100 + i]
        for g in range(2)
        for i in [4 * g, 4 * g + 1, 4 * g + 2]
    ]
    case = make_case([18 * 16] * 6, [1] * 6, rows=rows)
    plan = case.forest(Costs(partial_tokens=4.0, node_tokens=100.0))
    assert [(int(b), int(e)) for b, e in zip(plan.item_kv_begin, plan.item_kv_end, strict=True)][:2] == [
        (0, 272)
    ] * 2
    assert_accurate(case, "c", plan)


def test_prefill_does_not_share_what_saves_no_read():
    """Two 256-token prefills read their prefix in 8 full tiles, together or not."""
    rows = [[*range(8), *range(100 + 20 * s, 116 + 20 * s)] for s in range(2)]
    case = make_case([384, 384], [256, 256], rows=rows)
    assert case.forest().num_partials == 0


def test_unused_table_entries_are_never_compared():
    """Stale equal ids past the sequences' ends must not look like a shared prefix."""
    tables = np.array([[1, 9, 9, 9], [1, 9, 9, 9], [-1, 9, 9, 9]], dtype=np.int32)
    plan = ForestPlan.from_block_tables(
        tables, np.array([20, 25, 0]), np.array([0, 1, 2, 2]), 16, costs=ALWAYS_SHARE
    )
    assert plan.item_kv_end.tolist() == [16, 20, 25]
    assert plan.item_kv_begin.tolist() == [0, 16, 16]


def test_a_sequence_is_planned_the_same_in_every_batch():
    """Alone or among others: the same bits."""
    lens, queries = [700, 90, 1500, 33], [1, 30, 1, 33]
    case = make_case(lens, queries, head_dim=64)
    together = case.run("c")[0]
    metadata = case.metadata
    for s in range(4):
        tokens = slice(int(metadata.cu_seqlens_q[s]), int(metadata.cu_seqlens_q[s + 1]))
        alone = type(metadata)(
            cu_seqlens_q=torch.tensor([0, queries[s]], dtype=torch.int32),
            seq_lens=metadata.seq_lens[s : s + 1],
            positions=metadata.positions[tokens],
            slot_mapping=metadata.slot_mapping[tokens],
            block_table=metadata.block_table[s : s + 1],
            max_query_len=queries[s],
            max_seq_len=lens[s],
        )
        single = type(case)(case.q[tokens], case.k_cache, case.v_cache, alone)
        assert torch.equal(single.run("c")[0], together[tokens])


def test_a_plan_of_no_sequences():
    plan = ForestPlan.from_block_tables(np.zeros((0, 0), np.int32), [], [0], 16)
    assert (plan.num_items, plan.num_tokens, plan.num_partials) == (0, 0, 0)


def test_the_number_of_threads_does_not_change_a_bit(monkeypatch):
    """Threads share out the items; who does what and when must not show, also in the merge."""
    case = two_levels()
    plan = case.forest()
    expected = case.run("c", plan)
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        for _ in range(5):
            out, lse = case.run("c", plan)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])
