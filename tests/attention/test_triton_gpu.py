"""The Triton and Gluon kernels on a real GPU: bfloat16, large caches, CUDA graphs."""

import math
from dataclasses import replace

import pytest
import torch
from triton_cases import HAS_GPU, call_of, make_case, poisoned_memory, run, to_device

from octavo.attention import AttentionMetadata, LayerCache, gpu_paged
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


def assert_within_twice_plain_torch(case, **options):
    """err(kernel) <= 2 x err(dense attention in the same dtype) + eps, against float64."""
    out, lse = run(case, **options)
    exact_out, exact_lse = case.oracle(**options)
    plain = plain_torch(case, **options)
    assert not out.isnan().any()
    error = (out.double() - exact_out).abs().max()
    bound = (plain.double() - exact_out).abs().max()
    assert error <= 2 * bound + torch.finfo(case.q.dtype).eps / 8, f"{error:.1e}, plain torch {bound:.1e}"
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-3


def plain_torch(case, *, window=None):
    """Dense attention in the dtype of q, sequence by sequence: products and softmax are rounded to it."""
    out = torch.zeros_like(case.q)
    metadata, group = case.metadata, case.q.shape[1] // case.k_cache.shape[2]
    bounds = metadata.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if seq_len == 0 or bounds[s] == bounds[s + 1]:
            continue
        blocks = metadata.block_table[s, : -(-seq_len // case.k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:seq_len] for cache in (case.k_cache, case.v_cache))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        distance = metadata.positions[tokens, None] - torch.arange(seq_len)
        hidden = (distance < 0) | (distance >= (window or seq_len + 1))
        scores = torch.einsum("qhd,khd->hqk", case.q[tokens], k) * case.q.shape[-1] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_decode(dtype, block_size):
    case = make_case(
        [1, 700, 64, 0, 65], [1, 1, 3, 1, 1], heads=8, head_dim=128, block_size=block_size, dtype=dtype
    )
    assert_within_twice_plain_torch(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 48, 64, 192, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_mixed_batch(dtype, block_size, head_dim):
    """Enough sequences that no unit is split: the Hopper kernel takes blocks that 16 divides."""
    seq_lens = [200, 130, 90, 400, 33, 0, 70, 128] + [40] * 24
    query_lens = [200, 100, 1, 130, 33, 40, 1, 128] + [36] * 24
    case = make_case(seq_lens, query_lens, heads=8, head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_within_twice_plain_torch(case)
    moved = to_device(case)
    fat = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata).prefill
    is_taken = hopper_prefill.unsupported_reason(call_of(moved), fat) is None
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert is_taken == (is_hopper and block_size % 16 == 0)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_blocks_that_are_token_major_in_memory(block_size):
    """[N, B, KH, D] instead of [N, KH, B, D]: the same bits."""
    seq_lens, query_lens = [200, 130, 400] + [40] * 24, [200, 1, 130] + [36] * 24
    sizes = {"heads": 8, "head_dim": 128, "block_size": block_size, "dtype": torch.bfloat16}
    case = make_case(seq_lens, query_lens, **sizes)
    token_major = replace(case, k_cache=case.k_cache.contiguous(), v_cache=case.v_cache.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(run(case), run(token_major), strict=True))


@pytest.mark.parametrize("columns", [4, 8, 16])
def test_queries_between_other_numbers(columns):
    """Rows that begin at any multiple of 8 bytes: copies of 16 bytes take some, other kernels the rest."""
    sizes = {"heads": 8, "head_dim": 128, "block_size": 64, "dtype": torch.bfloat16}
    moved = to_device(make_case([200, 130] + [40] * 24, [200, 100] + [36] * 24, **sizes))
    fused = moved.q.new_zeros(moved.q.shape[0], 8 * 128 + columns)
    q = fused[:, columns:].unflatten(1, (8, 128))
    q.copy_(moved.q)
    arguments = (moved.cache, moved.metadata, ScoreOptions(0.1))
    apart, fresh = (gpu_paged.paged_attention_with_lse(x, *arguments)[0] for x in (q, moved.q))
    assert (apart - fresh).abs().max() < 2e-2


@pytest.mark.parametrize("window", [1, 100, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_windows(head_dim, window, block_size):
    case = make_case(
        [500, 1, 300, 150] + [40] * 24,
        [200, 1, 3, 150] + [36] * 24,
        heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
    )
    assert_within_twice_plain_torch(case, window=window)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_other_head_dims(head_dim):
    case = make_case([300, 70, 40], [120, 1, 40], head_dim=head_dim, dtype=torch.bfloat16)
    assert_within_twice_plain_torch(case)


@pytest.mark.parametrize("query_len", [1, 100])
def test_cache_beyond_int32_elements(query_len):
    """The trap of int32 addresses: the sequence's blocks lie past element 2^31 of the cache."""
    block_size, heads, dim = 64, 8, 128
    num_blocks = 2**31 // (block_size * heads * dim) + 40
    k_cache = torch.empty(num_blocks, heads, block_size, dim, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    k_cache[-4:].normal_()
    v_cache[-4:].normal_()
    table = torch.arange(num_blocks - 4, num_blocks, dtype=torch.int32, device="cuda").unsqueeze(0)

    def attend(k, v, table):
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, query_len], dtype=torch.int32, device="cuda"),
            seq_lens=torch.tensor([250], dtype=torch.int32, device="cuda"),
            positions=torch.arange(250 - query_len, 250, dtype=torch.int32, device="cuda"),
            slot_mapping=torch.zeros(query_len, dtype=torch.int64, device="cuda"),
            block_table=table,
            max_query_len=query_len,
            max_seq_len=250,
        )
        cache = LayerCache(k.transpose(1, 2), v.transpose(1, 2))
        return gpu_paged.paged_attention_with_lse(q, cache, metadata, ScoreOptions(0.1))

    q = torch.randn(query_len, heads, dim, dtype=torch.bfloat16, device="cuda")
    far = attend(k_cache, v_cache, table)
    near = attend(k_cache[-4:].clone(), v_cache[-4:].clone(), table - (num_blocks - 4))
    assert torch.equal(far[0], near[0])
    assert torch.equal(far[1], near[1])
    slots = torch.tensor([num_blocks * block_size - 1], device="cuda")
    k = torch.randn(1, heads, dim, dtype=torch.bfloat16, device="cuda")
    gpu_paged.store_kv(k, k, LayerCache(k_cache.transpose(1, 2), v_cache.transpose(1, 2)), slots)
    assert torch.equal(k_cache[-1, :, -1], k[0])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_replays_in_a_cuda_graph_with_other_lengths(head_dim):
    """One captured step, map included, serves later lengths; dead rows are 0."""
    sizes = {"head_dim": head_dim, "block_size": 64, "dtype": torch.bfloat16}
    moved = to_device(make_case([900, 300, 64], [1, 1, 1], **sizes))
    options = ScoreOptions(0.125)
    arguments = (moved.q, moved.cache, moved.metadata, options)
    gpu_paged.paged_attention_with_lse(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = gpu_paged.paged_attention_with_lse(*arguments)
    for seq_lens in ([900, 300, 64], [1, 0, 63], [500, 257, 0]):
        moved.metadata.seq_lens.copy_(torch.tensor(seq_lens))
        moved.metadata.positions.copy_(torch.tensor(seq_lens) - 1)
        graph.replay()
        with poisoned_memory():
            expected_out, expected_lse = gpu_paged.paged_attention_with_lse(*arguments)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
        dead = torch.tensor(seq_lens) == 0
        assert (lse.cpu() == -math.inf).all(dim=1).tolist() == dead.tolist()
        assert not out[dead.cuda()].any()


def test_same_bits_every_time():
    """Who merges last differs from run to run; the result does not."""
    moved = to_device(
        make_case([3000, 77, 1500], [1, 1, 1], head_dim=128, block_size=64, dtype=torch.bfloat16)
    )
    arguments = (moved.q, moved.cache, moved.metadata, ScoreOptions(0.1))
    first = gpu_paged.paged_attention_with_lse(*arguments)
    for _ in range(50):
        again = gpu_paged.paged_attention_with_lse(*arguments)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])
