"""Shared prefixes on a real GPU: 16-bit numbers, the default tilings, CUDA graphs that outlive plans."""

from dataclasses import replace

import pytest
import torch
from test_triton_gpu import plain_torch
from triton_cases import DEVICE, HAS_GPU, make_case, to_device

from octavo.attention import DeviceForest, LayerCache, gpu_paged
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton import nodes as triton_nodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]

SCALE = 128**-0.5


def make_forest(case, window=None):
    metadata = case.metadata
    forest = DeviceForest(
        max_num_seqs=metadata.seq_lens.shape[0],
        max_num_tokens=case.q.shape[0],
        num_heads=case.q.shape[1],
        num_kv_heads=case.k_cache.shape[2],
        head_dim=case.q.shape[2],
        block_size=case.k_cache.shape[1],
        dtype=case.q.dtype,
        device=DEVICE,
        max_partials=8192,
        window=window,
    )
    return forest


def upload(forest, case):
    arrays = (case.metadata.block_table, case.metadata.seq_lens, case.metadata.cu_seqlens_q)
    plan = forest.plan(*(array.numpy() for array in arrays), always=True)
    forest.upload(plan)
    return plan


def shared_case(query_lens, *, dtype=torch.bfloat16, block_size=64, heads=8, own_tokens=70, head_dim=128):
    """A root of 640 tokens; half of the sequences also share 320 more; each has some of its own."""
    root = list(range(640 // block_size))
    second = list(range(len(root), len(root) + 320 // block_size))
    num_own, first = -(-own_tokens // block_size), len(root) + len(second)
    rows, lens = [], []
    for i in range(len(query_lens)):
        shared = root + second if i % 2 else root
        rows.append([*shared, *range(first + i * num_own, first + (i + 1) * num_own)])
        lens.append(len(shared) * block_size + own_tokens - i % 5)
    sizes = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    return make_case(lens, query_lens, rows=rows, **sizes)


def attend(case, forest):
    moved = to_device(case)
    metadata = replace(moved.metadata, work=forest)
    options = ScoreOptions(case.q.shape[2] ** -0.5)
    return gpu_paged.paged_attention_with_lse(moved.q, moved.cache, metadata, options)


def assert_within_twice_plain_torch(case):
    forest = make_forest(case)
    forest.partial_out.fill_(torch.nan)
    forest.partial_lse.fill_(torch.nan)
    assert upload(forest, case).num_units > 0
    out, lse = (x.cpu() for x in attend(case, forest))
    exact_out, exact_lse = case.oracle()
    assert not out.isnan().any()
    error = (out.double() - exact_out).abs().max()
    bound = (plain_torch(case).double() - exact_out).abs().max()
    assert error <= 2 * bound + torch.finfo(case.q.dtype).eps / 8, f"{error:.1e}, plain torch {bound:.1e}"
    assert (lse - exact_lse).abs().max() < 1e-3


def node_results(case, plan, forest):
    """(out, lse) of the plan's partial results on the CPU, and whether fat units took the Hopper kernel."""
    moved = to_device(case)
    forest.upload(plan)
    forest.partial_out.fill_(torch.nan)
    forest.partial_lse.fill_(torch.nan)
    options = ScoreOptions(case.q.shape[2] ** -0.5)
    caches = (moved.q, moved.cache)
    call = triton_nodes.node_call(*caches, moved.metadata.positions, options, forest)
    gpu_paged.attend_fat_nodes(call, forest, decodes=case.metadata.max_query_len == 1)
    if forest.has_thin_units:
        triton_nodes.attend_thin_nodes(call, forest)
    results = (x[: plan.num_partials].cpu() for x in (forest.partial_out, forest.partial_lse))
    return *results, hopper_prefill.nodes_unsupported_reason(call, forest) is None


def expected_nodes(case, plan, dtype):
    """(out [P, H, D], lse [P, H]) of each unit's tokens over its keys, calculated in the dtype."""
    block_size, group = case.k_cache.shape[1], case.q.shape[1] // case.k_cache.shape[2]
    out = torch.full((plan.num_partials, *case.q.shape[1:]), torch.nan, dtype=dtype)
    lse = torch.full(out.shape[:2], torch.nan, dtype=dtype)
    arrays = (plan.tokens, plan.partial_ids, plan.block_ids)
    tokens, partial_ids, block_ids = (torch.from_numpy(x).long() for x in arrays)
    for units in (plan.thin_units, plan.fat_units):
        for table, begin, count, kv_begin, kv_end, *_ in units.tolist():
            key = torch.arange(kv_begin, kv_end)
            at = (block_ids[table + key // block_size], key % block_size)
            k, v = (x[at].to(dtype).repeat_interleave(group, 1) for x in (case.k_cache, case.v_cache))
            q, partial = case.q[tokens[begin : begin + count]].to(dtype), partial_ids[begin : begin + count]
            scores = torch.einsum("qhd,khd->qhk", q, k) * q.shape[2] ** -0.5
            lse[partial] = scores.logsumexp(-1)
            out[partial] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    return out, lse


def check_nodes(case):
    forest = make_forest(case)
    plan = upload(forest, case)
    out, lse, is_hopper = node_results(case, plan, forest)
    assert is_hopper == (torch.cuda.get_device_capability()[0] == 9 and case.k_cache.shape[1] % 16 == 0)
    exact_out, exact_lse = expected_nodes(case, plan, torch.float64)
    plain_out, _ = expected_nodes(case, plan, case.q.dtype)
    assert not out.isnan().any()
    error, bound = ((x.double() - exact_out).abs().max() for x in (out, plain_out))
    assert error <= 2 * bound + torch.finfo(case.q.dtype).eps / 8, f"{error:.1e}, plain torch {bound:.1e}"
    assert (lse - exact_lse).abs().max() < 1e-3


@pytest.mark.parametrize("num_sequences", [3, 40, 130])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_partial_results(num_sequences, group, head_dim):
    """Thin tiles for 3 sequences; tiles of up to 128 rows, some with at most 64, for more."""
    check_nodes(shared_case([1] * num_sequences, heads=2 * group, head_dim=head_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64, 128, 320])
def test_partial_results_of_other_caches(block_size, dtype):
    check_nodes(shared_case([1] * 40, block_size=block_size, dtype=dtype))


def test_both_node_kernels_agree(monkeypatch):
    """The Hopper kernel and the portable one, by one plan, on blocks of either order in memory."""
    case = shared_case([1] * 130)
    token_major = replace(case, k_cache=case.k_cache.contiguous(), v_cache=case.v_cache.contiguous())
    forest = make_forest(case)
    plan = upload(forest, case)
    assert plan.fat_units.shape[0] > 0
    out, lse, is_hopper = node_results(case, plan, forest)
    if not is_hopper:
        pytest.skip("needs a Hopper GPU")
    same_out, same_lse, _ = node_results(token_major, plan, forest)
    assert torch.equal(same_out, out)
    assert torch.equal(same_lse, lse)
    monkeypatch.setattr(hopper_prefill, "nodes_unsupported_reason", lambda *arguments: "not today")
    portable_out, portable_lse, _ = node_results(case, plan, forest)
    assert (portable_out - out).abs().max() < 5e-3
    assert (portable_lse - lse).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64, 320])
@pytest.mark.parametrize("num_sequences", [3, 40])
def test_decode(num_sequences, block_size, dtype):
    """Thin tiles for 3 sequences, fat ones for 40."""
    case = shared_case([1] * num_sequences, block_size=block_size, dtype=dtype)
    assert_within_twice_plain_torch(case)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("heads", [2, 6, 16])
def test_other_heads(heads, head_dim):
    assert_within_twice_plain_torch(shared_case([1] * 21, heads=heads, head_dim=head_dim))


@pytest.mark.parametrize("query_lens", [[5] * 12, [1, 70, 3, 64, 1, 9] * 2, [40] * 12])
def test_extend(query_lens):
    assert_within_twice_plain_torch(shared_case(query_lens))


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_many_prompts_beside_nodes(block_size):
    """Enough for tiles of 128 keys, but half of the leaves begin at 960 keys, where no such tile begins."""
    assert_within_twice_plain_torch(shared_case([40] * 130, block_size=block_size))


def captured(step):
    """A graph of a step, and where its results will be."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def test_a_graph_outlives_plans_growth_and_death():
    """One captured step serves several plans, later lengths and rows that died."""
    case = shared_case([1] * 12)
    other = shared_case([1] * 12, own_tokens=130)
    forest = make_forest(case)
    upload(forest, case)
    moved = to_device(case)
    width = max(c.metadata.block_table.shape[1] for c in (case, other))
    table = torch.zeros(12, width, dtype=torch.int32, device="cuda")
    # One case's lengths may reach where the other has written nothing.
    k_cache, v_cache = (x.cuda().nan_to_num(0.5) for x in (other.k_cache, other.v_cache))
    metadata = replace(moved.metadata, block_table=table, max_seq_len=width * 64, work=forest)
    arguments = (moved.q, LayerCache(k_cache, v_cache))
    options = ScoreOptions(SCALE)

    def step():
        return gpu_paged.paged_attention_with_lse(*arguments, metadata, options)

    graph, (out, lse) = captured(step)
    flat = replace(metadata, work=None)
    for source in (case, other, case):
        ids = source.metadata.block_table.clamp(0, k_cache.shape[0] - 1)
        table[:, : ids.shape[1]].copy_(ids)
        upload(forest, source)
        for grown in (0, 1, 3):
            lens = source.metadata.seq_lens - 5 + grown
            lens[grown] = 0
            metadata.seq_lens.copy_(lens)
            metadata.positions.copy_(lens - 1)
            graph.replay()
            expected_out, expected_lse = gpu_paged.paged_attention_with_lse(*arguments, flat, options)
            assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
            assert (lse - expected_lse).nan_to_num(0.0).abs().max() < 1e-4
            assert (out.float() - expected_out.float()).abs().max() < 2e-2
            assert not out[grown].any()


def test_same_bits_every_time():
    case = shared_case([1] * 40)
    forest = make_forest(case)
    upload(forest, case)
    first = attend(case, forest)
    for _ in range(20):
        again = attend(case, forest)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])
