"""Shared prefixes under windows on a real GPU: 16-bit numbers, default tilings, graphs that outlive plans.

What no window shows is NaN, and its blocks are gone from the tables.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import hide_unseen
from test_triton_forest_gpu import captured, make_forest, shared_case, upload
from test_triton_gpu import plain_torch
from triton_cases import HAS_GPU, poisoned_memory, to_device

from octavo.attention import LayerCache, gpu_paged
from octavo.attention.hopper import tma_decode as hopper_decode
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton import nodes as triton_nodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


def attend(case, window, forest):
    """(out, lse) on the CPU, and which of the step's kernels are Hopper's: of nodes, of leaves."""
    moved = to_device(case)
    options = ScoreOptions(case.q.shape[2] ** -0.5, window)
    layer = (moved.q, moved.cache, replace(moved.metadata, work=forest))
    with poisoned_memory():
        step_map = gpu_paged.make_step_map(*layer, window)
        out, lse = gpu_paged.attend_with_map(*layer, options, step_map)
    assert step_map.forest is forest
    kinds = []
    if forest is not None:
        call = triton_nodes.node_call(*layer[:2], layer[2].positions, options, forest)
        kinds.append(hopper_prefill.nodes_unsupported_reason(call, forest) is None)
        kinds.append(hopper_decode.unsupported_reason(call, step_map.decode) is None)
    return out.cpu(), lse.cpu(), kinds


def check(case, window, *, must_share=True):
    """With a forest and without: err(kernel) <= 2 x err(dense attention in the same dtype) + eps."""
    hidden = hide_unseen(case, window)
    forest = make_forest(hidden, window)
    forest.partial_out.fill_(torch.nan)
    forest.partial_lse.fill_(torch.nan)
    assert upload(forest, hidden).num_units > 0 or not must_share
    exact_out, exact_lse = hidden.oracle(window=window)
    bound = (plain_torch(case, window=window).double() - exact_out).abs().max()
    kinds = []
    for chosen in (forest, None):
        out, lse, kind = attend(hidden, window, chosen)
        kinds += kind
        assert not out.isnan().any()
        error = (out.double() - exact_out).abs().max()
        assert error <= 2 * bound + torch.finfo(case.q.dtype).eps / 8, f"{error:.1e}, plain {bound:.1e}"
        assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
        assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-3
    return kinds


@pytest.mark.parametrize("window", [128, 300, 301, 1000])
@pytest.mark.parametrize("num_sequences", [3, 40, 130])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode(num_sequences, head_dim, window):
    """Hopper's kernels and the portable ones, of thin tiles and of fat ones."""
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    kinds = check(shared_case([1] * num_sequences, head_dim=head_dim), window)
    assert kinds == [is_hopper, is_hopper and head_dim >= 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 128, 320])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_over_other_blocks(block_size, dtype, head_dim):
    """A tile of keys may lie in blocks of which the first ones are gone."""
    check(shared_case([1] * 40, block_size=block_size, dtype=dtype, head_dim=head_dim), 450)


@pytest.mark.parametrize("heads", [2, 4, 16])
def test_other_heads(heads):
    check(shared_case([1] * 40, heads=heads), 300)


@pytest.mark.parametrize("query_lens", [[5] * 12, [1, 70, 3, 64, 1, 9] * 2, [40] * 12, [40] * 130])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_extend(query_lens, block_size, head_dim):
    """Prompts beside nodes, of tiles of 64 and of 128 keys."""
    check(shared_case(query_lens, block_size=block_size, head_dim=head_dim), 200, must_share=False)


def test_both_node_kernels_agree(monkeypatch):
    case = hide_unseen(shared_case([1] * 130), 300)
    forest = make_forest(case, 300)
    assert upload(forest, case).fat_units.shape[0] > 0
    out, lse, (is_hopper, _) = attend(case, 300, forest)
    if not is_hopper:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(hopper_prefill, "nodes_unsupported_reason", lambda *arguments: "not today")
    portable_out, portable_lse, _ = attend(case, 300, forest)
    assert (portable_out.float() - out.float()).abs().max() < 2e-2
    assert (portable_lse - lse).abs().max() < 1e-4


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_graph_outlives_what_windows_leave_behind(head_dim):
    """One captured step and one plan, while sequences grow and end and blocks before their windows go."""
    window, grown_by = 400, (0, 1, 65, 200, 330)
    case = shared_case([1] * 12, own_tokens=400, head_dim=head_dim)
    full, last = case.metadata.seq_lens.clone(), max(grown_by)
    forest = make_forest(case, window)
    start = replace(case, metadata=replace(case.metadata, seq_lens=full - last, positions=full - last - 1))
    assert upload(forest, start).num_units > 0
    moved = to_device(case)
    table = torch.zeros_like(moved.metadata.block_table)
    spare = case.k_cache.shape[0] + 2
    caches = [torch.full((spare + 1, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (case.k_cache,) * 2]
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2).cuda() for x in caches)
    metadata = replace(moved.metadata, block_table=table, work=forest)
    arguments, options = (moved.q, LayerCache(k_cache, v_cache)), ScoreOptions(head_dim**-0.5, window)

    def step():
        return gpu_paged.paged_attention_with_lse(*arguments, metadata, options)

    graph, (out, lse) = captured(step)
    for ended, grown in enumerate(grown_by):
        lens = full - last + grown
        lens[ended] = 0
        now = replace(case.metadata, seq_lens=lens, positions=(lens - 1).clamp(min=0))
        # A sequence that has ended sees nothing, so its keys go, too.
        hidden = hide_unseen(replace(case, metadata=now), window)
        k_cache.copy_(hidden.k_cache)
        v_cache.copy_(hidden.v_cache)
        metadata.seq_lens.copy_(lens)
        metadata.positions.copy_(now.positions)
        table.copy_(hidden.metadata.block_table)
        graph.replay()
        exact_out, exact_lse = hidden.oracle(window=window)
        assert torch.equal(lse.cpu() == -torch.inf, exact_lse == -torch.inf)
        assert (lse.cpu() - exact_lse).nan_to_num(0.0).abs().max() < 1e-3
        assert (out.cpu().double() - exact_out).abs().max() < 2e-2
        assert not out[ended].any()
