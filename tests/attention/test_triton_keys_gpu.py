"""On a real GPU: keys beyond the causal mask, first keys and dense caches, by Hopper kernels if they can."""

from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, HAS_GPU, make_case, poisoned_memory, run, to_device

from octavo.attention import LayerCache, gpu_paged, store_kv, uniform_attention_with_lse
from octavo.attention.hopper import tma_decode as hopper_decode
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton.kernel_call import empty_results, make_call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]

DECODE = [1] * 6
PREFILL = [200, 130, 1, 300, 33, 64]
LENS = [500, 130, 90, 1400, 64, 65]


def assert_right(case, results=None, **options):
    """Against float64: a wrong key shows in the log-sum-exp, a wrong value in the result."""
    out, lse = run(case, **options) if results is None else results
    exact_out, exact_lse = case.oracle(**{k: v for k, v in options.items() if k != "num_splits"})
    assert not out.isnan().any()
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-3
    assert (out.double() - exact_out).abs().max() < 2.5 * torch.finfo(case.q.dtype).eps


def assert_hopper(case, **options):
    """Hopper's kernels take the call."""
    moved, scores = to_device(case), ScoreOptions(0.1, **options)
    metadata = moved.metadata
    made = gpu_paged.make_step_map(moved.q, moved.cache, metadata, scores.window, right=scores.right)
    call = make_call(
        *(moved.q, moved.cache, made.positions, metadata.block_table, scores, empty_results(moved.q)),
        begins=metadata.kv_begin is not None,
        one_block=gpu_paged.is_one_block(metadata),
    )
    reasons = [hopper_decode.unsupported_reason(call, made.decode)]
    if made.prefill is not None and made.prefill.num_parts == 1:
        reasons.append(hopper_prefill.unsupported_reason(call, made.prefill))
    assert reasons == [None] * len(reasons) or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
@pytest.mark.parametrize(
    "options",
    [{"right": None}, {"right": 9}, {"right": None, "window": 30}, {"right": 5, "window": 300}, {}],
)
@pytest.mark.parametrize("kv_begin", [None, [0, 64, 33, 1000, 500, 1]])
def test_keys_that_tokens_see(dtype, query_lens, options, kv_begin):
    repeat = 6
    case = make_case(
        LENS * repeat,
        query_lens * repeat,
        heads=8,
        head_dim=128,
        block_size=128,
        dtype=dtype,
        kv_begin=None if kv_begin is None else kv_begin * repeat,
    )
    assert_hopper(case, **options)
    assert_right(case, **options)


@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
@pytest.mark.parametrize("size", [1400, 1537])
@pytest.mark.parametrize("begins", [False, True])
def test_dense_caches_of_any_length(query_lens, size, begins):
    """[S, size, KH, D]: the last tile of a sequence reaches into the next one, or past the end of memory."""
    kv_begin = [0, 64, 33, 1000, 500, 1] if begins else None
    case = make_case(
        LENS,
        query_lens,
        heads=8,
        head_dim=128,
        block_size=size,
        rows=[[i] for i in range(6)],
        dtype=torch.bfloat16,
        kv_begin=kv_begin,
    )
    table = case.metadata.block_table[:, :1].contiguous()
    dense = (cache.contiguous() for cache in (case.k_cache, case.v_cache))
    k_cache, v_cache = dense
    case = replace(case, k_cache=k_cache, v_cache=v_cache, metadata=replace(case.metadata, block_table=table))
    for right in (0, None):
        assert_hopper(case, right=right)
        assert_right(case, right=right)


@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
def test_ragged_keys_in_one_block(query_lens):
    ends = torch.tensor(LENS).cumsum(0)
    total = int(ends[-1])
    sizes = {"heads": 8, "head_dim": 128, "block_size": total, "dtype": torch.bfloat16}
    case = make_case(ends.tolist(), query_lens, rows=[[0]] * 6, **sizes)
    k_cache, v_cache = torch.randn(2, 1, total, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    table, begin = torch.zeros(6, 1, dtype=torch.int32), (ends - torch.tensor(LENS)).int()
    metadata = replace(case.metadata, block_table=table, kv_begin=begin)
    case = replace(case, k_cache=k_cache, v_cache=v_cache, metadata=metadata)
    for right in (0, None):
        assert_hopper(case, right=right)
        assert_right(case, right=right)


@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 64), (59, 40), (1, 256), (64, 256)])
def test_values_of_another_head_dim(query_lens, head_dim, value_dim):
    case = make_case(LENS, query_lens, heads=8, head_dim=head_dim, value_dim=value_dim, dtype=torch.bfloat16)
    assert_right(case, right=3)


@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
@pytest.mark.parametrize("num_splits", [1, 3, 200])
def test_splits(query_lens, num_splits):
    case = make_case(LENS, query_lens, heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16)
    assert_right(case, num_splits=num_splits)


@pytest.mark.parametrize("query_lens", [DECODE, PREFILL])
def test_slopes_by_sequence_and_keys_after_the_query(query_lens):
    case = make_case(LENS, query_lens, heads=8, head_dim=64, dtype=torch.float16)
    slopes = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))
    for alibi_slopes in (slopes, slopes[0]):
        assert_right(case, alibi_slopes=alibi_slopes, right=None)


@pytest.mark.parametrize("query_len", [1, 3, 64])
@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_one_launch_makes_the_map(query_len, right, num_splits):
    lens = [max(n, query_len) for n in LENS]
    case = make_case(lens, [query_len] * 6, heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16)
    moved = to_device(case)
    with poisoned_memory():
        out, lse = uniform_attention_with_lse(
            moved.q,
            moved.cache,
            moved.metadata.seq_lens,
            moved.metadata.block_table,
            ScoreOptions(128**-0.5, right=right),
            query_len=query_len,
            max_seq_len=max(lens),
            num_splits=num_splits,
        )
    assert_right(case, (out.cpu(), lse.cpu()), right=right)


def test_float32_is_exact():
    """No TF32, whose error would be a thousand times larger."""
    case = make_case(LENS, PREFILL, heads=8, head_dim=128)
    out, _ = run(case)
    assert (out.double() - case.oracle()[0]).abs().max() < 1e-5


def test_a_cache_of_more_than_2_to_the_31_elements_with_other_value_dims():
    """The last block lies beyond what 32 bits can address, in keys and in values."""
    num_blocks, size = 2**31 // (256 * 2 * 64) + 2, 256
    k_cache = torch.empty(num_blocks, size, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    v_cache = torch.empty(num_blocks, size, 2, 96, dtype=torch.bfloat16, device=DEVICE)
    k, v = (
        torch.randn(200, 2, 64, device=DEVICE).bfloat16(),
        torch.randn(200, 2, 96, device=DEVICE).bfloat16(),
    )
    cache = LayerCache(k_cache, v_cache)
    slots = (num_blocks - 1) * size + torch.arange(200, device=DEVICE)
    store_kv(k, v, cache, slots)
    table = torch.tensor([[num_blocks - 1, 0]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([200], dtype=torch.int32, device=DEVICE)
    for query_len in (1, 100):
        q = torch.randn(query_len, 4, 64, device=DEVICE).bfloat16()
        options = ScoreOptions(0.125, right=None)
        out, _ = uniform_attention_with_lse(
            q, cache, lens, table, options, query_len=query_len, max_seq_len=200
        )
        dense = torch.nn.functional.scaled_dot_product_attention(
            *(x.double().repeat_interleave(4 // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)),
            scale=0.125,
        )
        assert (out.double() - dense.transpose(0, 1)).abs().max() < 0.02
