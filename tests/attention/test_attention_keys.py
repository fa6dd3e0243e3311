"""Which keys a token sees beyond the causal mask, and values, biases and scales of other shapes."""

from dataclasses import replace

import pytest
import torch
from attention_cases import KERNELS, assert_accurate, make_case, make_float8_case
from fewer import fewer

from octavo.attention import ForestPlan, LayerCache, paged_attention_with_lse, store_kv
from octavo.errors import ConfigError, InvalidArgumentError

STEPS = [([70, 33, 5, 0], [1, 1, 1, 0]), ([130, 64, 200, 3], [1, 64, 130, 3]), ([700, 90], [2, 90])]
SLOPES = torch.tensor([0.5, 0.1, 0.03, 0.0])


@pytest.mark.parametrize("impl", KERNELS)
@fewer("right", [0, 1, 40, 2**62, None])
@pytest.mark.parametrize(("seq_lens", "query_lens"), STEPS)
def test_keys_after_the_query(impl, seq_lens, query_lens, right):
    case = make_case(seq_lens, query_lens)
    assert_accurate(case, impl, right=right)
    assert_accurate(case, impl, right=right, window=20, softcap=3.0)


@pytest.mark.parametrize("impl", KERNELS)
@fewer("right", [0, 3, None])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("seq_lens", "query_lens"), STEPS)
def test_keys_before_the_first_one_are_not_read(impl, seq_lens, query_lens, window, right):
    """They are NaN; a first key may lie beyond all that a token sees, or beyond the sequence."""
    for first in ([1, 17, 64, 500], [60, 0, 3, 0], [69, 63, 199, 2]):
        case = make_case(seq_lens, query_lens, kv_begin=first[: len(seq_lens)])
        assert_accurate(case, impl, right=right, window=window)


@pytest.mark.parametrize("impl", KERNELS)
def test_sequences_in_one_block(impl):
    """Ragged keys without pages: one block, whose tokens belong to one sequence after the other."""
    generator = torch.Generator().manual_seed(3)
    lens, query_lens = [7, 100, 1, 33], [7, 40, 1, 2]
    ends = torch.tensor(lens).cumsum(0)
    case = make_case([int(end) for end in ends], query_lens, rows=[[0]] * 4, block_size=int(ends[-1]))
    case.k_cache.normal_(generator=generator)
    case.v_cache.normal_(generator=generator)
    kv_begin = (ends - torch.tensor(lens)).int()
    metadata = replace(case.metadata, kv_begin=kv_begin, block_table=torch.zeros(4, 1, dtype=torch.int32))
    case = replace(case, metadata=metadata)
    for right in (0, None):
        assert_accurate(case, impl, right=right)


@pytest.mark.parametrize("impl", ["reference", "torch", "auto"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 24), (59, 40), (192, 128), (8, 1), (512, 256)])
def test_values_of_another_head_dim(impl, head_dim, value_dim):
    case = make_case([70, 33, 600], [1, 20, 2], head_dim=head_dim, value_dim=value_dim)
    assert case.run(impl)[0].shape == (23, 4, value_dim)
    assert_accurate(case, impl, right=3)


@pytest.mark.parametrize("impl", ["reference", "torch", "auto"])
@pytest.mark.parametrize("right", [0, 5, None])
def test_slopes_by_head_and_by_sequence(impl, right):
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    case = make_case([70, 33, 90], [1, 20, 60])
    kinds = [SLOPES, slopes, torch.rand(4, 3).T[:, :1].expand(3, 4)]
    for alibi_slopes in kinds:
        assert_accurate(case, impl, right=right, alibi_slopes=alibi_slopes)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_scales_by_sequence(impl):
    case, _ = make_float8_case([70, 33, 90], [1, 20, 3])
    k_scale, v_scale = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    out, lse = case.run(impl, k_scale=k_scale, v_scale=v_scale)
    bounds = case.metadata.cu_seqlens_q.tolist()
    for s in range(3):
        alone = case.run(impl, k_scale=k_scale[s].contiguous(), v_scale=v_scale[s].contiguous())
        tokens = slice(bounds[s], bounds[s + 1])
        torch.testing.assert_close(out[tokens], alone[0][tokens])
        torch.testing.assert_close(lse[tokens], alone[1][tokens])


def test_the_compiled_kernels_say_what_they_lack():
    wide = make_case([20], [1], value_dim=8)
    with pytest.raises(ConfigError, match="values have head dim 8, keys 16"):
        wide.run("c")
    with pytest.raises(ConfigError, match="values have head dim 8, keys 16"):
        store_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 8), wide.cache, torch.tensor([0]), impl="c")
    case = make_case([20], [1])
    with pytest.raises(ConfigError, match="one ALiBi slope per head, not per sequence"):
        case.run("c", alibi_slopes=SLOPES[None])
    with pytest.raises(ConfigError, match="keys before the query only"):
        case.run("c", alibi_slopes=SLOPES, right=None)


@pytest.mark.parametrize("impl", ["torch", "c"])
def test_a_plan_is_made_for_what_tokens_see(impl):
    case = make_case([200, 150], [130, 1])
    lengths = (case.metadata.seq_lens.numpy(), case.metadata.cu_seqlens_q.numpy())
    wide = ForestPlan.flat(*lengths, right=None)
    for right in (0, 7, None):
        assert_accurate(case, impl, wide, right=right)
    with pytest.raises(InvalidArgumentError, match="the plan is for right=3, this call has right=None"):
        case.run(impl, ForestPlan.flat(*lengths, right=3), right=None)
    rows = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7]]
    shared = make_case([90, 75], [3, 20], rows=rows)
    assert_accurate(shared, impl, shared.forest(right=5), right=5)
    begins = make_case([200, 150], [130, 1], kv_begin=[3, 100])
    plan = ForestPlan.flat(*lengths, kv_begin=[3, 100])
    assert_accurate(begins, impl, plan)


def test_work_that_does_not_fit_the_first_keys_is_refused():
    case = make_case([200, 150], [3, 1], kv_begin=[3, 100])
    metadata = case.metadata
    lengths = (metadata.seq_lens.numpy(), metadata.cu_seqlens_q.numpy())
    with pytest.raises(InvalidArgumentError, match="sequences with kv_begin cannot share keys"):
        replace(metadata, work=ForestPlan.flat(*lengths))
    with pytest.raises(InvalidArgumentError, match="made for another kv_begin"):
        replace(metadata, work=ForestPlan.flat(*lengths, kv_begin=[3, 99]))
    with pytest.raises(InvalidArgumentError, match="made with kv_begin; give it to the metadata too"):
        replace(metadata, work=ForestPlan.flat(*lengths, kv_begin=[3, 100]), kv_begin=None)
    with pytest.raises(InvalidArgumentError, match=r"kv_begin must be \[2\] int32"):
        replace(metadata, kv_begin=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match="kv_begin must not be negative, got -1"):
        replace(metadata, kv_begin=torch.tensor([-1, 0], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"kv_begin must be \[2\], one per seq_lens entry"):
        ForestPlan.flat(*lengths, kv_begin=[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"right": -1}, "right must be at least 0 tokens"),
        ({"right": 1.0}, "right must be at least 0 tokens"),
        ({"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes must be \[4\] float32.* or \[1, 4\]"),
        ({"num_splits": -1}, "num_splits must be 0"),
        ({"num_splits": 1.0}, "num_splits must be 0"),
        ({"k_scale": torch.ones(2, 2), "v_scale": torch.ones(2, 2)}, "a row for each of the 1 sequences"),
        ({"k_scale": torch.ones(1, 2), "v_scale": torch.ones(2)}, "must have one shape"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    case, _ = make_float8_case([40], [2])
    cache = LayerCache(case.k_cache, case.v_cache, options.pop("k_scale", None), options.pop("v_scale", None))
    with pytest.raises(InvalidArgumentError, match=message):
        paged_attention_with_lse(case.q, cache, case.metadata, scale=1.0, **options)


def test_scales_by_sequence_cannot_store():
    case, _ = make_float8_case([40], [2])
    cache = LayerCache(case.k_cache, case.v_cache, torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(InvalidArgumentError, match=r"must be \[KH\] to store"):
        store_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 16), cache, torch.tensor([0]))
