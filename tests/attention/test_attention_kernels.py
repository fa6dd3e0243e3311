"""Every implementation against a dense float64 oracle, over caches that hold NaN outside of the sequences."""

import pytest
import torch
from attention_cases import KERNELS, assert_accurate, make_case

from octavo.attention import ForestPlan, available_impls, merge, paged_attention

pytestmark = pytest.mark.parametrize("impl", KERNELS)


@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 48, 64, 257])
def test_lengths_around_a_block_edge(impl, block_size):
    lens = [max(block_size - 1, 1), block_size, block_size + 1, 2 * block_size]
    case = make_case(lens + lens, [1] * 4 + lens, block_size=block_size)
    assert_accurate(case, impl)


@pytest.mark.parametrize("head_dim", [1, 8, 20, 40, 59, 64, 80, 96, 128, 192, 256, 512])
def test_head_dims(impl, head_dim):
    assert_accurate(make_case([70, 33, 5], [1, 33, 2], head_dim=head_dim), impl)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (7, 1), (9, 3), (16, 1), (50, 1)]
)
def test_grouped_heads(impl, heads, kv_heads):
    assert_accurate(make_case([40, 70, 9], [1, 20, 9], heads=heads, kv_heads=kv_heads), impl)


OPTIONS = {
    "window": {"window": 20},
    "window of one": {"window": 1},
    "window longer than all": {"window": 10_000},
    "softcap": {"softcap": 1.5},
    "large softcap": {"softcap": 50.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 0.0])},
    "scale": {"scale": 0.5},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 4.0, -torch.inf])},
    "all": {"window": 30, "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.03, 1.0]), "scale": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(impl, options):
    assert_accurate(make_case([130, 64, 200, 3], [1, 64, 70, 3]), impl, **options)


def test_every_window_edge(impl):
    """Window edges meet block and tile edges in every way."""
    case = make_case([200, 129], [1, 2], head_dim=8)
    for window in range(1, 201):
        assert_accurate(case, impl, window=window)


def test_options_with_heads_that_do_not_fill_a_vector(impl):
    slopes = torch.tensor([0.5, 0.1, 0.03, 0.0, 0.7, 0.2])
    case = make_case([130, 90], [50, 1], heads=6, head_dim=24)
    assert_accurate(case, impl, window=17, softcap=3.0, alibi_slopes=slopes)


def test_mixed_ragged_batch(impl):
    """Prefill, chunked prefill, decode, an empty sequence and one without query tokens, in one call."""
    assert_accurate(make_case([300, 150, 0, 90, 77, 1, 64], [1, 150, 0, 0, 40, 1, 3], head_dim=32), impl)


def test_no_tokens_at_all(impl):
    case = make_case([5, 0], [0, 0])
    out, lse = case.run(impl)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_long_sequences_are_split_and_merged(impl):
    case = make_case([700, 1300, 2000], [1, 2, 3], head_dim=8, block_size=16)
    assert (
        ForestPlan.flat(case.metadata.seq_lens.numpy(), case.metadata.cu_seqlens_q.numpy()).num_partials > 0
    )
    assert_accurate(case, impl)


def test_rows_that_see_nothing_are_zero(impl):
    case = make_case([40, 40], [3, 1])
    case.metadata.positions[1] = -1
    out, lse = case.run(impl)
    assert torch.equal(out[1], torch.zeros(4, 16))
    assert (lse[1] == -torch.inf).all()
    assert_accurate(case, impl)


def test_all_partials_absent_are_zero(impl):
    """A token whose every partial is empty: 0 and -inf, not NaN, and not the query."""
    case = make_case([1300], [3], head_dim=8)
    case.metadata.positions[1] = -1
    out, lse = case.run(impl)
    assert torch.equal(out[1], torch.zeros(4, 8))
    assert (lse[1] == -torch.inf).all()
    assert_accurate(case, impl)


def test_nan_is_not_hidden(impl):
    """A broken model must look broken, with one partial or several, and only where it is."""
    case = make_case([1300, 40, 40], [1, 1, 1], head_dim=8)
    case.q[:2] = torch.nan
    out, lse = case.run(impl)
    assert out[:2].isnan().all()
    assert lse[:2].isnan().all()
    assert not out[2].isnan().any()


def test_query_tokens_past_the_last_sequence_are_zero(impl):
    """Padding rows belong to no sequence: 0 and -inf, and not what memory held."""
    case = make_case([40, 9], [3, 1])
    case.q = torch.cat([case.q, case.q])
    case.metadata.positions.resize_(8).fill_(5)
    out, lse = case.run(impl)
    assert not out[4:].any()
    assert (lse[4:] == -torch.inf).all()


def test_strided_queries_and_caches(impl):
    """q is a slice of a fused qkv; the caches are [N, B, KH, D] and interleaved [N, B, KH, 2, D] memory."""
    case = make_case([70, 20], [4, 20])
    expected = case.run("reference")[0]
    fused = torch.full((case.q.shape[0], 8, 16), torch.nan)
    fused[:, :4] = case.q
    interleaved = torch.stack([case.k_cache, case.v_cache], dim=3)
    case.q, case.k_cache, case.v_cache = fused[:, :4], interleaved[:, :, :, 0], interleaved[:, :, :, 1]
    assert not case.k_cache.is_contiguous()
    torch.testing.assert_close(case.run(impl)[0], expected)


def test_large_scores_do_not_overflow(impl):
    case = make_case([100, 30], [1, 30])
    assert_accurate(case, impl, scale=60.0)


def test_tiny_first_key_then_large(impl):
    """The running maximum rises late by hundreds: what was summed before must fade to 0, not to NaN."""
    case = make_case([200], [1], heads=2, kv_heads=2)
    block, offset = divmod(190, 16)
    case.k_cache[int(case.metadata.block_table[0, block]), offset] = 40 * case.q[0, :2]
    assert_accurate(case, impl, scale=5.0)


def test_block_tables_are_read_only_within_the_sequence(impl):
    """-1 and ids far outside the pool lie past every sequence's end (see make_case)."""
    case = make_case([17], [1])
    assert case.metadata.block_table[0, 2:].tolist() == [-1, 1 << 30]
    assert_accurate(case, impl)


def test_blocks_that_left_the_window_are_not_read(impl):
    case = make_case([200, 150], [1, 2])
    expected = case.run(impl, window=20)
    case.k_cache[case.metadata.block_table[:, :4].long()] = torch.nan
    case.v_cache[case.metadata.block_table[:, :4].long()] = torch.nan
    actual = case.run(impl, window=20)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_paged_attention_is_the_first_result(impl):
    case = make_case([30], [2])
    out = paged_attention(case.q, case.cache, case.metadata, scale=0.25, impl=impl)
    assert torch.equal(out, case.run(impl, scale=0.25)[0])


def test_partials_of_disjoint_windows_merge_to_the_whole(impl):
    """(out, lse) is a partial result: a window and the keys before it make up all keys."""
    case = make_case([100], [1])
    whole_out, whole_lse = case.run(impl)
    recent = case.run(impl, window=37)
    case.metadata.positions[0] = 100 - 37 - 1
    before = case.run(impl)
    out, lse = merge(torch.stack([before[0], recent[0]]), torch.stack([before[1], recent[1]]))
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(impl, dtype):
    if available_impls("cpu", dtype)[impl] is not None:
        pytest.skip("the compiled kernels are float32")
    case = make_case([90, 40, 600], [1, 40, 2], dtype=dtype)
    assert_accurate(case, impl)
    assert_accurate(case, impl, window=9, softcap=5.0, alibi_slopes=torch.tensor([0.5, 0.1, 0.2, 0.0]))
