"""What only a GPU shows: nothing waits for it, CUDA graphs replay calls, offsets need 64 bits."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from drawn_cases import draw_on_gpu
from edge_rows import FORMS, check_empty_rows, check_no_sequences
from kvcache_cases import kvcache_case
from ops_cases import dense_case, varlen_case
from test_ops_matrix import check

from octavo.errors import InvalidArgumentError
from octavo.ops import flash_attn_with_kvcache

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


@contextmanager
def waiting_refused():
    """Make calls that wait for the device raise."""
    with warnings.catch_warnings():
        # PyTorch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
@pytest.mark.parametrize("number", range(6))
def test_waits_for_nothing(kind, number):
    case = draw_on_gpu(kind, 500_000, number)
    case.function(**case.arguments)
    with waiting_refused():
        case.function(**case.arguments)


@pytest.mark.parametrize("page", [None, 16])
def test_a_captured_call_follows_the_lengths(page):
    """The lengths, the table and the new keys are read on the device when the graph is replayed."""
    shape = (3, 64) if page is None else (16, page)
    caches = torch.randn(2, *shape, 2, 64, device="cuda", dtype=torch.bfloat16)
    expected = caches.clone()
    q, k, v = (torch.randn(3, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    cos, sin = torch.randn(2, 80, 32, device="cuda", dtype=torch.bfloat16)
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    table = None if page is None else torch.randperm(16, device="cuda")[:12].view(3, 4).int()

    def call(k_cache, v_cache):
        return flash_attn_with_kvcache(
            *(q, k_cache, v_cache, k, v, cos, sin, lens), block_table=table, causal=True
        )

    call(*caches.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*caches)
    for lengths in ([0, 5, 16], [1, 62, 33]):
        for x in (q, k, v):
            x.normal_()
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, call(*expected))
        assert torch.equal(caches, expected)


def test_a_cache_of_more_than_2_31_elements():
    """The last blocks of a large pool: offsets do not fit 32 bits."""
    num_blocks, page = 2**31 // (16 * 8 * 128) + 64, 16
    caches = torch.zeros(2, num_blocks, page, 8, 128, dtype=torch.float16, device="cuda")
    table = torch.arange(num_blocks - 4, num_blocks, device="cuda", dtype=torch.int32).view(1, 4)
    caches[:, -4:] = torch.randn(2, 4, page, 8, 128, device="cuda").half()
    small = caches[:, -4:].clone()
    q, k, v = (torch.randn(1, 3, heads, 128, device="cuda").half() for heads in (16, 8, 8))
    lens = torch.tensor([60], dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": lens, "causal": True}
    out = flash_attn_with_kvcache(q, *caches, k, v, block_table=table, **options)
    expected = flash_attn_with_kvcache(q, *small, k, v, block_table=table - (num_blocks - 4), **options)
    assert torch.equal(out, expected)
    assert torch.equal(caches[:, -4:], small)
    assert not caches[:, :-4].any()


@pytest.mark.parametrize(("what", "value"), [("table", 99), ("length", 100)])
def test_debug_names_the_sequence(monkeypatch, what, value):
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    caches = torch.randn(2, 8, 16, 2, 64, device="cuda").half()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    lens = torch.tensor([20, 30], dtype=torch.int32)
    if what == "table":
        table[1, 1] = value
    else:
        lens[1] = value
    q = torch.randn(2, 1, 4, 64, device="cuda").half()
    with pytest.raises(InvalidArgumentError, match="sequence 1"):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lens.cuda(), block_table=table.cuda())


def test_debug_names_the_table_that_is_too_narrow(monkeypatch):
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    caches = torch.randn(2, 8, 16, 2, 64, device="cuda").half()
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    x = torch.randn(2, 1, 2, 64, device="cuda").half()
    with pytest.raises(InvalidArgumentError, match="block_table"):
        flash_attn_with_kvcache(x, *caches, x, x, cache_seqlens=64, block_table=table)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_negative_length_is_empty(dtype, form):
    check_empty_rows("cuda", dtype, *form)


def test_no_sequences():
    check_no_sequences("cuda")


@pytest.mark.parametrize("number", range(6))
def test_debug_changes_nothing(monkeypatch, number):
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    check(draw_on_gpu(kvcache_case, 600_000, number))
