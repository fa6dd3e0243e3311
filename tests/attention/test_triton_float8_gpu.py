"""float8 caches on a real GPU: bfloat16 queries, the assembly, CUDA graphs."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_float8_case
from triton_cases import HAS_GPU, call_of, run, to_device, triton

from octavo.attention import LayerCache, gpu_paged
from octavo.attention.cache import FLOAT8
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton.float8_pairs import unpack

tl = triton.language
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


@triton.jit
def unpack_kernel(pairs, low, high, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low_number, high_number = unpack(tl.load(pairs + at))
    tl.store(low + at, low_number)
    tl.store(high + at, high_number)


def test_unpacks_every_pair():
    pairs = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    low, high = torch.empty(2, 2**16, dtype=torch.float16, device="cuda")
    unpack_kernel[(64,)](pairs, low, high, 1024)
    expected = pairs.cpu().view(FLOAT8).to(torch.float16).view(-1, 2)
    for actual, numbers in zip((low, high), expected.unbind(1), strict=True):
        torch.testing.assert_close(actual.cpu(), numbers, rtol=0, atol=0, equal_nan=True)


def check(seq_lens, query_lens, *, dtype=torch.bfloat16, window=None, **shape):
    """err(kernel) <= 2 x err(plain torch in the same dtype over the same numbers) + eps, against float64."""
    case, (k_scale, v_scale) = make_float8_case(seq_lens, query_lens, dtype=dtype, **shape)
    options = {} if window is None else {"window": window}
    out, lse = run(case, k_scale=k_scale, v_scale=v_scale, **options)
    exact_case = replace(
        case,
        q=case.q.float(),
        k_cache=case.k_cache.float() * k_scale[:, None],
        v_cache=case.v_cache.float() * v_scale[:, None],
    )
    exact_out, exact_lse = exact_case.oracle(**options)
    plain_out, _ = case.run("reference", k_scale=k_scale, v_scale=v_scale, **options)
    assert not out.isnan().any()
    error = (out.double() - exact_out).abs().max()
    bound = (plain_out.double() - exact_out).abs().max()
    assert error <= 2 * bound + torch.finfo(dtype).eps / 8, f"{error:.1e}, plain torch {bound:.1e}"
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 2e-3
    return case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode(dtype, block_size, head_dim):
    check(
        [1, 700, 64, 0, 65],
        [1, 1, 3, 1, 1],
        heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mixed_batch_takes_the_portable_kernel(dtype, block_size, head_dim):
    seq_lens = [200, 130, 90, 400, 33, 0, 70, 128] + [40] * 24
    query_lens = [200, 100, 1, 130, 33, 40, 1, 128] + [36] * 24
    case = check(seq_lens, query_lens, heads=8, head_dim=head_dim, block_size=block_size, dtype=dtype)
    moved = to_device(case)
    fat = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata).prefill
    assert fat is not None
    assert hopper_prefill.unsupported_reason(call_of(moved), fat) is not None


@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize("window", [None, 50])
def test_other_head_dims_and_windows(head_dim, window):
    check([300, 70, 40], [120, 1, 40], head_dim=head_dim, window=window)


def test_float32_queries():
    case, _ = make_float8_case([300, 70, 40], [120, 1, 40], head_dim=64)
    out, _ = run(case)
    exact_out, _ = replace(case, k_cache=case.k_cache.float(), v_cache=case.v_cache.float()).oracle()
    assert (out.double() - exact_out).abs().max() < 4e-3


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_store_rounds_as_torch_does(source):
    k = (torch.randn(512, 4, 64) * torch.logspace(-4, 4, 512)[:, None, None]).to("cuda", source)
    k_cache = torch.empty(8, 64, 4, 64, dtype=FLOAT8, device="cuda")
    v_cache = torch.empty_like(k_cache)
    gpu_paged.store_kv(k, -k, LayerCache(k_cache, v_cache), torch.arange(512, device="cuda"))
    expected = k.cpu().float().clamp(-448, 448).to(FLOAT8).float()
    assert torch.equal(k_cache.cpu().flatten(0, 1).float(), expected)
    assert torch.equal(v_cache.cpu().flatten(0, 1).float(), -expected)


def test_replays_in_a_cuda_graph_with_other_lengths():
    case, scales = make_float8_case(
        [900, 300, 64], [1, 1, 1], head_dim=128, block_size=64, dtype=torch.bfloat16
    )
    moved = to_device(case)
    k_scale, v_scale = (scale.cuda() for scale in scales)
    options = ScoreOptions(0.125)
    cache = LayerCache(moved.k_cache, moved.v_cache, k_scale, v_scale)
    arguments = (moved.q, cache, moved.metadata, options)
    gpu_paged.paged_attention_with_lse(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = gpu_paged.paged_attention_with_lse(*arguments)
    for seq_lens in ([900, 300, 64], [1, 0, 63], [500, 257, 0]):
        moved.metadata.seq_lens.copy_(torch.tensor(seq_lens))
        moved.metadata.positions.copy_(torch.tensor(seq_lens) - 1)
        graph.replay()
        expected_out, expected_lse = gpu_paged.paged_attention_with_lse(*arguments)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
