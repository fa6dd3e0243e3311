"""Sequences with equally many queries: the map that one launch makes is that of three launches."""

from dataclasses import replace

import pytest
import torch
from attention_cases import KERNELS, assert_error, dense_oracle, finite_max
from fewer import fewer
from triton_cases import DEVICE, make_case, poisoned_memory, to_device

from octavo.attention import gpu_paged, uniform_attention_with_lse
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton import uniform_map
from octavo.errors import InvalidArgumentError


def plan(moved, query_len, options, num_splits=0):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16, "block_size": 16}
    with poisoned_memory():
        return uniform_map.make_uniform_map(
            moved.metadata.seq_lens,
            moved.metadata.kv_begin,
            query_len=query_len,
            max_seq_len=moved.metadata.max_seq_len,
            dtype=torch.float32,
            cache_dtype=torch.float32,
            options=options,
            num_splits=num_splits,
            **sizes,
        )


SEEN = [
    ScoreOptions(1.0),
    ScoreOptions(1.0, right=None),
    ScoreOptions(1.0, window=20),
    ScoreOptions(1.0, window=5, right=7),
]


@pytest.mark.parametrize("options", SEEN)
@pytest.mark.parametrize("kv_begin", [None, [0, 70, 3, 500, 64]])
@fewer("query_len", [1, 3, 70, 30])
@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64])
def test_the_map_is_the_same(query_len, kv_begin, options, lens_dtype):
    case = make_case([300, 130, 90, 77, 300], [query_len] * 5, kv_begin=kv_begin)
    case = replace(case, metadata=replace(case.metadata, seq_lens=case.metadata.seq_lens.to(lens_dtype)))
    moved = to_device(case)
    made, cu_seqlens_q = plan(moved, query_len, options)
    expected = gpu_paged.make_step_map(
        moved.q, moved.cache, moved.metadata, options.window, right=options.right
    )
    assert torch.equal(cu_seqlens_q, moved.metadata.cu_seqlens_q)
    assert torch.equal(made.positions, expected.positions)
    if expected.prefill is None:
        assert made.prefill is None
        assert torch.equal(made.decode.units, expected.decode.units)
        assert torch.equal(made.decode.schedule, expected.decode.schedule)
        assert torch.equal(made.decode.arrivals, expected.decode.arrivals)
        assert made.decode.partial_out.shape == expected.decode.partial_out.shape
        assert made.decode.shape == expected.decode.shape
    else:
        assert made.decode is None
        used = expected.prefill.units[expected.prefill.units[:, 2] > 0]
        assert torch.equal(made.prefill.units[:, :7], used[:, :7])
        assert made.prefill.shape == expected.prefill.shape


def test_a_batch_of_the_largest_size():
    lens = torch.randint(1, 400, (1024,), generator=torch.Generator().manual_seed(0)).int()
    moved = to_device(make_case([20], [1]))
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(1025, device=DEVICE).int(),
        seq_lens=lens.to(DEVICE),
        positions=lens.to(DEVICE) - 1,
        slot_mapping=lens.to(DEVICE),
        block_table=torch.zeros(1024, 25, dtype=torch.int32, device=DEVICE),
        max_query_len=1,
        max_seq_len=400,
    )
    moved = replace(moved, metadata=metadata, q=moved.q.expand(1024, -1, -1))
    made, cu_seqlens_q = plan(moved, 1, ScoreOptions(1.0))
    expected = gpu_paged.make_step_map(moved.q, moved.cache, metadata)
    assert torch.equal(cu_seqlens_q, metadata.cu_seqlens_q)
    assert torch.equal(made.decode.units, expected.decode.units)
    assert torch.equal(made.decode.schedule, expected.decode.schedule)
    assert not made.decode.arrivals.any()


@pytest.mark.parametrize("impl", [*KERNELS, "triton"])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("query_len", [1, 30])
@fewer("right", [0, 2, None])
def test_against_the_oracle(impl, query_len, right, num_splits):
    """Also sequences shorter than their queries, whose first queries may see nothing."""
    lens = [300, 17, 0, 64]
    case = make_case(lens, [min(query_len, n) for n in lens], kv_begin=[3, 0, 0, 70])
    positions = torch.cat([torch.arange(n - query_len, n) for n in lens]).int()
    q = torch.randn(4 * query_len, 4, 16, generator=torch.Generator().manual_seed(0))
    metadata = replace(
        case.metadata,
        cu_seqlens_q=(torch.arange(5) * query_len).int(),
        positions=positions,
        max_query_len=query_len,
        may_be_short=True,
    )
    case = replace(case, q=q, metadata=metadata)
    moved = to_device(case) if impl == "triton" else case
    with poisoned_memory():
        out, lse = uniform_attention_with_lse(
            moved.q,
            moved.cache,
            moved.metadata.seq_lens,
            moved.metadata.block_table,
            ScoreOptions(0.25, right=right),
            query_len=query_len,
            max_seq_len=300,
            kv_begin=moved.metadata.kv_begin,
            num_splits=num_splits,
            impl=impl,
        )
    exact_out, exact_lse = dense_oracle(case, scale=0.25, right=right)
    plain_out, plain_lse = case.run("reference", scale=0.25, right=right)
    eps = 4 * torch.finfo(torch.float32).eps
    assert not out.isnan().any()
    assert_error(out.cpu(), exact_out, plain_out, eps)
    assert_error(lse.cpu(), exact_lse, plain_lse, eps * (1 + finite_max(exact_lse)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_len": 2}, "q must have 2 rows for each entry of seq_lens"),
        ({"seq_lens": torch.zeros(3)}, r"seq_lens must be contiguous \[3\] int32"),
        ({"kv_begin": torch.zeros(2, dtype=torch.int32)}, r"kv_begin must be contiguous \[3\] int32"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int32)}, r"block_table must be \[3, max_blocks\]"),
        ({"max_seq_len": 10**6}, "does not fit the block table's"),
        ({"num_splits": -1}, "num_splits must be 0"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    case = make_case([20, 30, 40], [1, 1, 1])
    arguments = {
        "seq_lens": case.metadata.seq_lens,
        "block_table": case.metadata.block_table,
        "options": ScoreOptions(1.0),
        "query_len": 1,
        "max_seq_len": 40,
        **changes,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        uniform_attention_with_lse(case.q, case.cache, **arguments)


def test_sequences_shorter_than_their_queries_are_refused_unless_told():
    case = make_case([20], [1])
    short = {"cu_seqlens_q": torch.tensor([0, 30]), "positions": torch.arange(-10, 20).int()}
    with pytest.raises(InvalidArgumentError, match="must include the sequence's 30 query tokens"):
        replace(case.metadata, **short)
    assert replace(case.metadata, **short, may_be_short=True).positions[0] == -10
    with pytest.raises(InvalidArgumentError, match=r"seq_lens\[0\] must not be negative"):
        replace(case.metadata, seq_lens=torch.tensor([-1]), may_be_short=True)
