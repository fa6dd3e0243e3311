"""The plan over shared nodes: with the leaves, every (token, key) pair once; never more than fits."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import ALWAYS_SHARE
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.plan.node_plan import NodeCapacity, NodePlan, NodeTiling
from octavo.attention.plan.prefix_forest import Costs
from octavo.errors import InvalidArgumentError

TILING = NodeTiling(
    thin_tokens=2,
    fat_tokens=8,
    thin_programs=6,
    fat_programs=4,
    num_kv_heads=2,
    align_tokens=16,
    min_segment_tokens=32,
)
H200 = NodeTiling(8, 64, 264, 132, num_kv_heads=8, align_tokens=64, min_segment_tokens=256)
ROOMY = NodeCapacity(1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20)


def make_table(rows):
    table = np.full((len(rows), max(map(len, rows)) + 1), -1, dtype=np.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return table


def make_plan(rows, seq_lens, query_lens, block_size, *, tiling=TILING, costs=ALWAYS_SHARE, **options):
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)])
    arrays = (make_table(rows), np.array(seq_lens), cu_seqlens_q, block_size)
    return NodePlan.from_block_tables(*arrays, tiling=tiling, costs=costs, **options)


@st.composite
def forests(draw):
    """Random trees of depth 0 to 6 with ragged leaves, empty rows and rows without query tokens."""
    ids = iter(range(100_000))
    block_size = draw(st.sampled_from([1, 3, 16, 48]))
    rows = []

    def grow(prefix, depth):
        blocks = draw(st.integers(0, 4)) * draw(st.sampled_from([1, 16 if block_size < 16 else 1]))
        node = prefix + [next(ids) for _ in range(blocks)]
        for _ in range(draw(st.sampled_from([1, 1, 2, 8, 64])) if draw(st.booleans()) else 1):
            rows.append(node + [next(ids) for _ in range(draw(st.integers(1, 2)))])
        for _ in range(draw(st.integers(0, 3)) if depth < 6 and len(rows) < 40 else 0):
            grow(node, depth + 1)

    grow([], 0)
    rows = draw(st.permutations(rows)) if len(rows) < 12 else rows[::-1]
    seq_lens = [draw(st.integers(0, 1)) and len(row) * block_size - draw(st.integers(0, 1)) for row in rows]
    query_lens = [min(n, draw(st.sampled_from([1, 1, 1, 0, 5]))) for n in seq_lens]
    return rows, seq_lens, query_lens, block_size


def check_plan(plan, rows, seq_lens, query_lens, block_size):
    """Each token's nodes cover 0 : leaf_begin, from the root down, through its own sequence's blocks."""
    sequence = np.repeat(np.arange(len(rows)), query_lens)
    keys = {}
    for units, most in ((plan.thin_units, TILING.thin_tokens), (plan.fat_units, TILING.fat_tokens)):
        for table, begin, count, kv_begin, kv_end, *seen_by_all, _ in units.tolist():
            assert 0 < count <= most
            assert seen_by_all == [kv_begin, kv_end]
            assert 0 <= kv_begin < kv_end
            assert kv_begin % TILING.align_tokens == kv_end % TILING.align_tokens == 0
            blocks = slice(kv_begin // block_size, -(-kv_end // block_size))
            ids = plan.block_ids[table + blocks.start : table + blocks.stop].tolist()
            for entry in range(begin, begin + count):
                token, partial = int(plan.tokens[entry]), int(plan.partial_ids[entry])
                assert partial not in keys
                assert plan.merge_begin[token] <= partial < plan.merge_begin[token + 1]
                assert rows[sequence[token]][blocks] == ids
                keys[partial] = range(kv_begin, kv_end)
    assert sorted(keys) == list(range(plan.num_partials))
    for token, s in enumerate(sequence):
        partials = range(plan.merge_begin[token], plan.merge_begin[token + 1])
        assert [key for partial in partials for key in keys[partial]] == list(range(plan.leaf_begin[s]))
        assert plan.leaf_begin[s] <= seq_lens[s] - query_lens[s]


@given(forests())
@settings(max_examples=150, deadline=None)
def test_each_key_before_the_leaves_once(forest):
    check_plan(make_plan(*forest), *forest)


@given(forests(), st.integers(0, 40), st.integers(0, 6), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_never_exceeds_its_capacity(forest, num_partials, num_units, num_blocks):
    limits = {"num_partials": num_partials, "num_units": num_units, "num_blocks": num_blocks}
    plan = make_plan(*forest, capacity=replace(ROOMY, **limits))
    assert plan.num_partials <= num_partials
    assert max(plan.thin_units.shape[0], plan.fat_units.shape[0]) <= num_units
    assert plan.block_ids.shape[0] <= num_blocks
    check_plan(plan, *forest)


def test_gives_up_the_least_valuable_nodes_first():
    """A long run shared by 8 stays, a short one shared by 2 goes."""
    rows = [[*range(20), 100 + i] for i in range(8)] + [[200, 201 + i] for i in range(2)]
    lens = [16 * len(row) for row in rows]
    tokens = {"query_lens": [1] * 10, "block_size": 16}
    assert (make_plan(rows, lens, **tokens).leaf_begin == [320] * 8 + [16] * 2).all()
    plan = make_plan(rows, lens, **tokens, capacity=replace(ROOMY, num_blocks=20))
    assert (plan.leaf_begin == [320] * 8 + [0] * 2).all()


def test_makes_longer_segments_before_it_gives_up_a_node():
    """Two segments would balance the programs better, but there is room for the results of one."""
    rows = [[*range(16), 100 + i] for i in range(4)]
    lens = [16 * len(row) for row in rows]
    assert make_plan(rows, lens, [1] * 4, 16).num_partials > 4
    plan = make_plan(rows, lens, [1] * 4, 16, capacity=replace(ROOMY, num_partials=4))
    assert plan.num_partials == 4
    assert (plan.leaf_begin == 256).all()


def test_classes_tiles_and_segments():
    """64 sequences fill fat tiles; 4 are two thin tiles; long nodes are cut so that programs have work."""
    rows = [[*range(64), 1000 + i] for i in range(64)] + [[2000, 2001, 3000 + i] for i in range(4)]
    lens = [16 * len(row) for row in rows]
    plan = make_plan(rows, lens, [1] * 68, 16)
    assert plan.fat_units[:, 2].tolist() == [8] * plan.fat_units.shape[0]
    # 8 tiles x 2 heads of one segment would be 4 rounds of 4 programs; shorter ones bring nothing.
    assert sorted(set(plan.fat_units[:, 3])) == list(range(0, 1024, int(plan.fat_units[0, 4])))
    assert plan.thin_units[:, 2].tolist() == [2, 2]
    assert plan.sharing.saved_tokens == 63 * 1024 + 3 * 32


@pytest.mark.parametrize(
    ("num_sequences", "num_tokens", "segment_lens"),
    [
        (256, 4096, [1024] * 4),
        (192, 4096, [832] * 4 + [768]),
        (40, 4096, [256] * 16),
        (512, 4096, [2048] * 2),
    ],
)
def test_segments_fill_132_programs_once(num_sequences, num_tokens, segment_lens):
    """Tiles of 64 tokens, 8 heads: as many segments as bring at most 132 items, for 1, 3, 4 and 8 tiles."""
    costs = Costs(partial_tokens=8.0, node_tokens=64.0, tile_tokens=64)
    shared = range(num_tokens // 64)
    rows = [[*shared, 1000 + i] for i in range(num_sequences)]
    lens = [64 * len(row) for row in rows]
    plan = make_plan(rows, lens, [1] * num_sequences, 64, tiling=H200, costs=costs)
    segments = {(begin, end) for begin, end in plan.fat_units[:, 3:5].tolist()}
    assert [end - begin for begin, end in sorted(segments)] == segment_lens
    assert plan.fat_units.shape[0] * 8 <= 132


@pytest.mark.parametrize(("num_sequences", "num_segments"), [(256, 2), (128, 4), (33, 8)])
def test_tiles_of_32_tokens_make_longer_segments(num_sequences, num_segments):
    """As while sequences decode on Hopper: 8, 4 and 2 tiles, each for 8 heads on 132 programs."""
    costs = Costs(partial_tokens=8.0, node_tokens=64.0, tile_tokens=32)
    rows = [[*range(64), 1000 + i] for i in range(num_sequences)]
    tiling = replace(H200, fat_tokens=32)
    plan = make_plan(rows, [65 * 64] * num_sequences, [1] * num_sequences, 64, tiling=tiling, costs=costs)
    assert plan.fat_units.shape[0] == num_segments * -(-num_sequences // 32)
    assert (plan.fat_units[:, 2] <= 32).all()


def test_a_sequence_that_computes_what_others_share_is_no_member():
    """Equal prompts in one step: the first computes all blocks, the second half of them, others read."""
    rows = [[*range(8), 10 + i] for i in range(5)]
    plan = make_plan(rows, [16 * 9] * 5, [16 * 9, 16 * 5, 16, 3, 1], 16)
    assert plan.leaf_begin.tolist() == [0, 64, 128, 128, 128]


def test_shares_nothing_below_the_threshold():
    rows = [[0, 1, 2], [0, 1, 3]]
    assert make_plan(rows, [48, 48], [1, 1], 16).num_units == 1
    assert make_plan(rows, [48, 48], [1, 1], 16, min_saved_tokens=33).num_units == 0
    assert make_plan(rows, [48, 48], [1, 1], 16, min_saved_tokens=32).num_units == 1
    assert make_plan(rows, [48, 48], [1, 1], 16, costs=Costs(partial_tokens=16.0)).num_units == 0


def test_refuses_a_step_that_cannot_fit():
    with pytest.raises(InvalidArgumentError, match="2 sequences and 2 query tokens does not fit"):
        make_plan([[0, 1], [0, 2]], [32, 32], [1, 1], 16, capacity=replace(ROOMY, num_tokens=1))
