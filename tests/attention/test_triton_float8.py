"""float8 caches in the Triton kernels against the reference, and exact stores."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_float8_case
from triton_cases import DEVICE, assert_close, poisoned_memory, run, to_device

from octavo.attention import KVCache, LayerCache, gpu_paged
from octavo.attention.cache import FLOAT8
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError


def check(seq_lens, query_lens, *, scale=None, window=None, softcap=0.0, alibi_slopes=None, **shape):
    """Hold the kernel to twice the error of float16 products over the cache's numbers, in float64."""
    case, scales = make_float8_case(seq_lens, query_lens, **shape)
    options = {"scale": scale, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes}
    results = run(case, **options, k_scale=scales[0], v_scale=scales[1])
    exact = replace(
        case,
        k_cache=case.k_cache.float() * scales[0][:, None],
        v_cache=case.v_cache.float() * scales[1][:, None],
    )
    assert_close(exact, results, eps=2 * torch.finfo(torch.float16).eps, **options)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_decodes_lengths_at_block_edges(block_size):
    b = min(block_size, 96)
    check([max(b - 1, 1), b, b + 1, 2 * b, 1], [1] * 5, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_prefills_and_extends_lengths_at_block_edges(block_size):
    lens = [block_size + 20, 2 * block_size, 2 * block_size + 1, 64, 65]
    check(lens, [20, 2 * block_size, 1, 64, 40], block_size=block_size, heads=8, kv_heads=2)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_any_even_head_dim(head_dim):
    check([70, 33, 17], [1, 20, 17], head_dim=head_dim)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 60]])
def test_options_of_scores(query_lens):
    """The scale of keys comes before cap and bias."""
    slopes = torch.tensor([0.5, 0.25, 0.02, 0.1])
    check([70, 100], query_lens, window=20)
    check([70, 100], query_lens, softcap=2.0)
    check([70, 100], query_lens, softcap=5.0, alibi_slopes=slopes, window=40, scale=0.7)


def test_queries_beyond_float16_saturate():
    """Products are float16: a query that it cannot hold becomes its largest number, not infinite."""
    case, _ = make_float8_case([40, 70], [1, 60])
    large = replace(case, q=case.q * 2.0**17)
    assert large.q.abs().max() > 65504
    limited = replace(case, q=large.q.clamp(-65504, 65504))
    for actual, expected in zip(run(large, scale=1e-5), run(limited, scale=1e-5), strict=True):
        assert torch.equal(actual, expected)
        assert actual.isfinite().all()


def test_refuses_an_odd_head_dim():
    case, _ = make_float8_case([20], [1], head_dim=15)
    moved = to_device(case)
    with pytest.raises(InvalidArgumentError, match="even head dim"):
        gpu_paged.paged_attention_with_lse(moved.q, moved.cache, moved.metadata, ScoreOptions(1.0))


@pytest.mark.parametrize("scaled", [False, True])
def test_store_rounds_saturates_and_keeps_nan(scaled):
    """Numbers of every magnitude, beyond 448 too, divided by their head's scale."""
    cache = KVCache.allocate(
        num_layers=1, num_blocks=3, block_size=4, num_kv_heads=3, head_dim=20, dtype=FLOAT8, device=DEVICE
    )
    k_cache, v_cache = cache.layer(0).k, cache.layer(0).v
    k, v = torch.randn(2, 5, 3, 20, device=DEVICE) * torch.logspace(-4, 4, 5, device=DEVICE)[:, None, None]
    k[0, 0, 0], k[1, 1, 1], v[2, 2, 2] = torch.nan, torch.inf, -torch.inf
    scales = torch.tensor([[0.5, 1.0, 3.0], [2.0, 0.1, 1.0]], device=DEVICE)
    cache.data.view(torch.uint8).fill_(1)
    slots = torch.tensor([11, -1, 0, 7, 2], device=DEVICE)
    with poisoned_memory():
        gpu_paged.store_kv(k, v, LayerCache(k_cache, v_cache, *(scales if scaled else ())), slots)
    for rows, stored, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        expected = (rows / scale[:, None] if scaled else rows).clamp(-448, 448).to(FLOAT8)
        for token, slot in [(0, 11), (2, 0), (3, 7), (4, 2)]:
            actual = stored[slot // 4, slot % 4]
            torch.testing.assert_close(
                actual.float(), expected[token].float(), rtol=0, atol=0, equal_nan=True
            )
    assert int((cache.data.view(torch.uint8) != 1).any(-1).sum()) == 4 * 2 * 3
