"""Plans of forests in the Triton kernels: stale, replaced, shared by layers, or refused."""

import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import make_case, make_float8_case
from triton_cases import DEVICE, assert_close, to_device
from triton_forest_cases import THIN, make_forest, make_map, run_shared, shared_case

from octavo.attention import (
    ForestPlan,
    KVCache,
    LayerCache,
    forest_attention,
    gpu_paged,
    paged_attention,
)
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton import nodes as triton_nodes
from octavo.errors import InvalidArgumentError
from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.gpu_step import TritonStep
from octavo.layers.steps.operator_step import OperatorStep


def test_a_window_takes_the_flat_path():
    case = shared_case()
    expected = run_shared(case, None, window=20)
    forest, _ = make_forest(case)
    assert all(torch.equal(a, b) for a, b in zip(run_shared(case, forest, window=20), expected, strict=True))
    assert forest.partial_lse.isnan().all()


def test_an_empty_plan_gives_the_flat_bits():
    case = make_case([70, 40, 90], [1, 3, 60])
    forest, plan = make_forest(case)
    assert plan.num_units == 0
    assert all(
        torch.equal(a, b) for a, b in zip(run_shared(case, forest), run_shared(case, None), strict=True)
    )


def test_a_plan_outlives_growth_and_death():
    """Rows grow into their last blocks, or die and leave a table row of other blocks behind."""
    early = shared_case()
    grown = [8 * 16 - 16, 11 * 16 - 3, 0, 9 * 16, 0]
    rows = [[*range(6), 20], [*range(6), 10, 11, 12, 21, 22], [7] * 9, [*range(6), 24, 25, 26], [30, 31]]
    later = make_case(grown, [1] * 5, rows=rows, block_size=16)
    forest, plan = make_forest(later, early)
    assert plan.num_units > 0
    later.metadata.positions[:] = later.metadata.seq_lens - 1
    later.metadata.block_table[2] = 1 << 30
    out, lse = run_shared(later, forest)
    assert_close(later, (out, lse))
    assert (lse[2] == -torch.inf).all()
    assert not out[2].any()


def test_rows_of_a_plan_that_have_left_the_batch_are_not_read():
    case = shared_case()
    forest, plan = make_forest(case)
    metadata = case.metadata
    cut = replace(
        metadata,
        cu_seqlens_q=metadata.cu_seqlens_q[:3],
        seq_lens=metadata.seq_lens[:2],
        positions=metadata.positions[:2],
        block_table=metadata.block_table[:2],
    )
    q = case.q.clone()
    q[2:] = torch.nan
    small = replace(case, q=q[:2], metadata=cut)
    assert_close(small, run_shared(small, forest))
    assert not forest.partial_lse[: plan.num_partials].isnan().any()


def test_uploads_replace_each_other():
    """One forest, a plan with nodes, one without, one of other sequences."""
    first, second = shared_case(), make_case([70, 40, 90, 20, 33], [1] * 5)
    forest, _ = make_forest(first)
    for case in (second, first):
        plan = make_forest(case)[1]
        forest.upload(plan)
        assert (forest.merge_begin[5:] == plan.num_partials).all(), "tokens behind the plan's have none"
        assert_close(case, run_shared(case, forest))


@pytest.mark.parametrize(
    ("query_lens", "rows"), [([1] * 5, 64), ([1, 0, 1, 1, 0], 64), ([1, 2, 1, 1, 1], 128)]
)
def test_units_are_half_as_large_on_hopper_while_sequences_decode(monkeypatch, query_lens, rows):
    """One warpgroup's rows, which leaves room for the leaves."""
    monkeypatch.setattr("octavo.attention.tilings.hopper.unsupported_reason", lambda *args, **kwargs: None)
    case = shared_case(query_lens, heads=32, kv_heads=1)
    forest, plan = make_forest(case, thin=None, fat=None)
    assert forest.fat_tile(decodes=rows == 64).rows == rows
    assert plan.fat_units.shape[0] > 0
    assert plan.fat_units[:, 2].max() == rows // 32
    assert forest.num_fat_units.tolist() == [plan.fat_units.shape[0]]
    assert forest.num_thin_units.tolist() == [plan.thin_units.shape[0]]


def test_one_map_serves_many_layers():
    case = shared_case()
    forest, _ = make_forest(case)
    moved = to_device(replace(case, metadata=replace(case.metadata, work=forest)))
    tensors = (moved.q, moved.cache, moved.metadata)
    step_map = make_map(moved)
    results = [gpu_paged.attend_with_map(*tensors, ScoreOptions(0.25), step_map) for _ in range(3)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


# Lengths and query lengths of twelve sequences that share eight blocks of 16, and their rows.
TWELVE = [160 - i for i in range(12)], [1] * 11 + [3]
ROWS_OF_TWELVE = [[*range(8), 10 + 2 * i, 11 + 2 * i] for i in range(12)]


def host_arrays(case):
    return tuple(getattr(case.metadata, name).numpy() for name in ("block_table", "seq_lens", "cu_seqlens_q"))


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_attends_in_one_call(impl, monkeypatch):
    """forest_attention makes positions, metadata and plan by itself, and shares."""
    monkeypatch.setattr("octavo.attention.plan.device_forest._LAUNCH_BYTES", 0)
    case = make_case(*TWELVE, rows=ROWS_OF_TWELVE)
    moved, launched = to_device(case), []
    attend = triton_nodes.attend_thin_nodes
    monkeypatch.setattr(triton_nodes, "attend_thin_nodes", lambda *a: launched.append(attend(*a)))
    out = forest_attention(moved.q, moved.cache, *host_arrays(case), scale=0.25, impl=impl)
    exact, _ = case.oracle(scale=0.25)
    assert (out.cpu() - exact).abs().max() < 1e-5
    assert len(launched) == (impl == "triton")


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_attends_over_a_float8_cache_in_one_call(impl, monkeypatch):
    monkeypatch.setattr("octavo.attention.plan.device_forest._LAUNCH_BYTES", 0)
    # The interpreter alone has no float8; triton_cases gives it some.
    for module in ("interface", "implementations"):
        monkeypatch.setattr(sys.modules[f"octavo.attention.{module}"], "choose_impl", lambda impl, *_: impl)
    case, scales = make_float8_case(*TWELVE, rows=ROWS_OF_TWELVE, block_size=16)
    moved = to_device(case)
    k_scale, v_scale = (scale.to(DEVICE) for scale in scales)
    out = forest_attention(
        *(moved.q, LayerCache(moved.k_cache, moved.v_cache, k_scale, v_scale), *host_arrays(case)),
        scale=0.25,
        impl=impl,
    )
    exact = replace(
        case,
        k_cache=case.k_cache.float() * scales[0][:, None],
        v_cache=case.v_cache.float() * scales[1][:, None],
    )
    expected, _ = exact.oracle(scale=0.25)
    # Products are float16 in the kernels.
    assert (out.cpu() - expected).abs().max() < 4e-3 * expected.abs().max()


def shared_step():
    """A case, its forest and plan with the default tilings, and a cache of two layers."""
    case = shared_case()
    forest, plan = make_forest(case, thin=None, fat=None)
    assert plan.num_units > 0
    cache = KVCache.allocate(
        num_layers=2, num_blocks=40, block_size=16, num_kv_heads=2, head_dim=16, device=DEVICE
    )
    cache.data.normal_()
    return case, forest, plan, cache


def test_a_step_shares_in_layers_without_a_window():
    """TritonStep with the default tilings: one step's layers with and without a window."""
    case, forest, plan, cache = shared_step()
    qkv = torch.randn(5, 8 * 16, device=DEVICE)
    rotations = torch.ones(2, 5, 8, device=DEVICE)

    def attend(with_forest):
        metadata = replace(to_device(case).metadata, work=with_forest)
        step = TritonStep(cache, metadata, num_heads=4)
        windows = (None, 20)
        options = [LayerOptions(layer, 0, 0.25, window, 0.0, None) for layer, window in enumerate(windows)]
        return [step.attend(qkv.clone(), rotations, layer) for layer in options]

    (shared, windowed), (flat, flat_windowed) = attend(forest), attend(None)
    assert not forest.partial_lse[: plan.num_partials].isnan().any()
    assert not torch.equal(shared, flat)
    assert (shared - flat).abs().max() < 1e-5
    assert torch.equal(windowed, flat_windowed)


def test_a_steps_layers_have_sinks():
    """Shared nodes or not, with and without a window: what the public operators compute."""
    case, forest, _, cache = shared_step()
    metadata = to_device(case).metadata
    qkv, angles = torch.randn(5, 8 * 16, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    rotations = torch.stack((angles.cos(), angles.sin()))
    by_operators = OperatorStep(cache, metadata, 4, "reference")
    for layer, window in enumerate((None, 20)):
        sinks = torch.tensor([0.5, -3.0, 4.0, 1.0], device=DEVICE)
        options = LayerOptions(layer, 0, 0.25, window, 0.0, None, sinks)
        expected = by_operators.attend(
            qkv.clone(), torch.polar(torch.ones_like(angles), angles)[:, None], options
        )
        for work in (forest, None):
            step = TritonStep(cache, replace(metadata, work=work), num_heads=4)
            assert (step.attend(qkv.clone(), rotations, options) - expected).abs().max() < 1e-5


def test_refuses_what_it_was_not_made_for():
    case = shared_case()
    with pytest.raises(
        InvalidArgumentError, match=r"\(H, KH, D\) = \(4, 2, 16\), the layer has \(8, 2, 16\)"
    ):
        run_shared(shared_case(heads=8), make_forest(case)[0])
    with pytest.raises(InvalidArgumentError, match="make a larger one"):
        run_shared(shared_case([1, 1, 9, 1, 1]), make_forest(case)[0])
    with pytest.raises(InvalidArgumentError, match="multiples of 16 keys"):
        run_shared(case, make_forest(case)[0], thin=replace(THIN, keys=64))
    plan = make_forest(case)[1]
    small = make_forest(case, max_blocks=1)[0]
    with pytest.raises(InvalidArgumentError, match="does not fit"):
        small.upload(plan)


def test_work_for_other_kernels_is_refused():
    case = shared_case()
    forest, _ = make_forest(case)
    device = to_device(case)
    plan = ForestPlan.flat(case.metadata.seq_lens.numpy(), case.metadata.cu_seqlens_q.numpy())
    planned = replace(device.metadata, work=plan)
    with pytest.raises(InvalidArgumentError, match="a ForestPlan, which the Triton kernels do not read"):
        paged_attention(device.q, device.cache, planned, scale=0.1, impl="triton")
    shared = replace(case.metadata, work=forest)
    with pytest.raises(InvalidArgumentError, match="a DeviceForest, which only the Triton kernels read"):
        paged_attention(case.q, case.cache, shared, scale=0.1, impl="torch")
