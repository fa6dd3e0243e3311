"""Shared prefixes in the Triton kernels: forest = flat = float64, on random forests and stale plans."""

import sys
from dataclasses import replace

import pytest
import torch
from attention_cases import make_case, make_float8_case
from fewer import fewer
from hypothesis import given, settings
from test_node_plan import forests
from triton_cases import DEVICE, HAS_GPU, assert_close, poisoned_memory, to_device

from octavo.attention import (
    DeviceForest,
    ForestPlan,
    KVCache,
    LayerCache,
    forest_attention,
    gpu_paged,
    paged_attention,
)
from octavo.attention.options import ScoreOptions
from octavo.attention.triton import nodes as triton_nodes
from octavo.attention.triton import step_map as triton_plan
from octavo.attention.triton.shapes import TileShape
from octavo.errors import InvalidArgumentError
from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.operators import OperatorStep
from octavo.layers.steps.triton import TritonStep

THIN = TileShape(rows=16, keys=16, num_warps=4, num_stages=2, programs_per_multiprocessor=3)
FAT = replace(THIN, rows=32, programs_per_multiprocessor=2)


def make_forest(case, plan_case=None, **options):
    """A forest with NaN where no kernel has written, and the plan of a case uploaded."""
    metadata, plan_case = case.metadata, plan_case or case
    options = {"thin": THIN, "fat": FAT, "min_segment_tokens": 32, "max_units": 4096} | options
    with poisoned_memory():
        forest = DeviceForest(
            max_num_seqs=metadata.seq_lens.shape[0] + 1,
            max_num_tokens=case.q.shape[0] + 3,
            max_partials=4096,
            num_heads=case.q.shape[1],
            num_kv_heads=case.k_cache.shape[2],
            head_dim=case.q.shape[2],
            block_size=case.k_cache.shape[1],
            dtype=case.q.dtype,
            device=DEVICE,
            **options,
        )
    planned = plan_case.metadata
    arrays = (planned.block_table, planned.seq_lens, planned.cu_seqlens_q)
    plan = forest.plan(*(array.numpy() for array in arrays), always=True)
    forest.upload(plan)
    return forest, plan


def shared_case(query_lens=(1, 1, 1, 1, 1), *, block_size=16, **shape):
    """Four sequences under a root of 6 blocks, two of them under a second level; and one by itself."""
    root, second = list(range(6)), [10, 11, 12]
    rows = [[*root, 20], [*root, *second, 21, 22], [*root, *second, 23], [*root, 24, 25, 26], [30, 31]]
    lens = [len(row) * block_size - i for i, row in enumerate(rows)]
    return make_case(lens, list(query_lens), rows=rows, block_size=block_size, **shape)


def make_map(moved, window=None, thin=THIN, right=0):
    heads = (moved.q.shape[1], moved.k_cache.shape[2], moved.q.shape[2])
    names = ("num_heads", "num_kv_heads", "head_dim")
    sizes = dict(zip(names, heads, strict=True), num_tokens=moved.q.shape[0], dtype=moved.q.dtype)
    return triton_plan.plan_step(moved.metadata, window=window, thin=thin, fat=FAT, right=right, **sizes)


def run_shared(case, forest, *, window=None, thin=THIN, **options):
    """Attend with small tiles, so that small cases have many; returns (out, lse) on the CPU."""
    moved = to_device(replace(case, metadata=replace(case.metadata, work=forest)))
    options = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()}
    scores = ScoreOptions(case.q.shape[-1] ** -0.5, window, **options)
    with poisoned_memory():
        step_map = make_map(moved, window, thin, scores.right)
        tensors = (moved.q, moved.cache, moved.metadata)
        out, lse = gpu_paged.attend_with_map(*tensors, scores, step_map)
    return out.cpu(), lse.cpu()


def check(case, **options):
    forest, plan = make_forest(case)
    assert plan.num_units > 0
    assert_close(case, run_shared(case, forest, **options), **options)


@pytest.mark.parametrize("block_size", [16, 48, 64])
@fewer(("heads", "kv_heads"), [(6, 2), (2, 2), (12, 1), (16, 2)])
def test_decode(heads, kv_heads, block_size):
    check(shared_case(heads=heads, kv_heads=kv_heads, block_size=block_size))


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
    monkeypatch.setattr("octavo.attention.choice.num_multiprocessors", lambda device: 24)
    monkeypatch.setattr("octavo.attention.triton.step_map._MIN_SPLIT_KEYS", 32)
    case = shared_case([3, 18, 1, 7, 2])
    assert make_map(to_device(case)).fat.num_parts > 1
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
    monkeypatch.setattr("octavo.attention.hopper.shapes.unsupported_reason", lambda *args, **kwargs: None)
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
    for module in ("forest_attention", "choice"):
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


def test_a_step_shares_in_layers_without_a_window():
    """TritonStep with the default tilings: one step's layers with and without a window."""
    case = shared_case()
    forest, plan = make_forest(case, thin=None, fat=None)
    assert plan.num_units > 0
    cache = KVCache.allocate(
        num_layers=2, num_blocks=40, block_size=16, num_kv_heads=2, head_dim=16, device=DEVICE
    )
    cache.data.normal_()
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
    case = shared_case()
    forest, plan = make_forest(case, thin=None, fat=None)
    assert plan.num_units > 0
    cache = KVCache.allocate(
        num_layers=2, num_blocks=40, block_size=16, num_kv_heads=2, head_dim=16, device=DEVICE
    )
    cache.data.normal_()
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
