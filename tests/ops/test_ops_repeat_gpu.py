"""Calls that are alike are repeated from the third on, and do what the first one did."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drawn_cases import draw_on_gpu
from kvcache_cases import kvcache_case
from ops_cases import dense_case, varlen_case

from octavo.kernels import repeat, tape
from octavo.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


def run_as_written(self, function, groups, given):
    return function(*groups)


def copied(arguments):
    """Arguments of the same layout in other memory."""

    def copy(x):
        like = torch.empty(0, dtype=x.dtype, device=x.device)
        return like.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())

    return {name: copy(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
@pytest.mark.parametrize("number", range(40))
def test_later_calls_do_as_the_first(monkeypatch, kind, number):
    case = draw_on_gpu(kind, 800_000, number)
    # PyTorch takes its operators apart in one of the modes only.
    with torch.inference_mode(number % 2 == 0):
        check_later_calls(monkeypatch, case)


def check_later_calls(monkeypatch, case):
    for number in range(4):
        arguments, others = copied(case.arguments), copied(case.arguments)
        if number == 3 and arguments["q"].dtype != torch.float8_e4m3fn:
            for given in (arguments, others):
                given["q"].neg_()
        actual = case.function(**arguments)
        with monkeypatch.context() as patch:
            patch.setattr(repeat.Repeater, "run", run_as_written)
            expected = case.function(**others)
        assert_same(actual, expected)
        for name in ("k_cache", "v_cache"):
            if name in arguments:
                a, b = (x[name].contiguous().view(torch.uint8) for x in (arguments, others))
                assert torch.equal(a, b)


class Common:
    """Calls that most callers make, on random tensors: 4 sequences of up to 128 tokens in pages of 64."""

    def __init__(self, q_offset=0):
        draw = {"dtype": torch.bfloat16, "device": "cuda"}
        self.memory = torch.randn(4 * 16 * 8 * 128 + 8, **draw)
        self.q = self.memory[q_offset : q_offset + 4 * 8 * 128].view(4, 1, 8, 128)
        self.ragged_q = self.memory[q_offset : q_offset + 64 * 8 * 128].view(64, 8, 128)
        self.caches = torch.randn(2, 8, 64, 2, 128, **draw)
        self.new = torch.randn(2, 4, 1, 2, 128, **draw)
        self.angles = torch.randn(2, 128, 64, **draw)
        self.lens = torch.randint(1, 127, (4,), dtype=torch.int32, device="cuda")
        self.table = torch.randperm(8, device="cuda").int().view(4, 2)
        self.bounds = torch.tensor([0, 5, 30, 30, 64], dtype=torch.int32, device="cuda")

    def decode(self):
        table = {"block_table": self.table}
        return flash_attn_with_kvcache(self.q, *self.caches, cache_seqlens=self.lens, causal=True, **table)

    def append(self):
        cache = self.caches.clone()
        more = {"block_table": self.table, "rotary_interleaved": False, "causal": True}
        out = flash_attn_with_kvcache(self.q, *cache, *self.new, *self.angles, self.lens, **more)
        return torch.cat([out.flatten(), cache.flatten()])

    def dense(self):
        return flash_attn_func(self.q, *self.caches[:, :4], causal=True)

    def ragged(self):
        k, v = self.caches.flatten(1, 2)[:, :64]
        return flash_attn_varlen_func(self.ragged_q, k, v, self.bounds, self.bounds, 64, 64, causal=True)

    def paged(self):
        lens = {"seqused_k": self.lens, "block_table": self.table, "max_seqlen_k": 128}
        return flash_attn_varlen_func(
            self.ragged_q, *self.caches, self.bounds, max_seqlen_q=64, causal=True, **lens
        )


FORMS = ("decode", "append", "dense", "ragged", "paged")


@pytest.mark.parametrize("form", FORMS)
def test_common_calls_are_repeated(monkeypatch, form):
    played = []
    play = tape.Tape.play
    monkeypatch.setattr(tape.Tape, "play", lambda *args: played.append(1) or play(*args))
    for _ in range(4):
        getattr(Common(), form)()
    assert len(played) >= 2


@pytest.mark.parametrize("form", FORMS)
def test_another_alignment_is_another_call(monkeypatch, form):
    for _ in range(3):
        getattr(Common(), form)()
    for _ in range(3):
        call = getattr(Common(q_offset=1), form)
        actual = call()
        with monkeypatch.context() as patch:
            patch.setattr(repeat.Repeater, "run", run_as_written)
            assert torch.equal(actual, call())


def test_threads_and_streams(monkeypatch):
    """Eight threads make the same calls on streams and tensors of their own."""
    calls = [Common() for _ in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(repeat.Repeater, "run", run_as_written)
        expected = [[getattr(call, form)() for form in FORMS] for call in calls]
    torch.cuda.synchronize()

    def work(call):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [[getattr(call, form)() for form in FORMS] for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(8) as threads:
        for results, own in zip(threads.map(work, calls), expected, strict=True):
            for result in results:
                assert_same(result, own)


def test_a_repeated_call_can_be_captured():
    call = Common()
    expected = [getattr(call, form)() for _ in range(3) for form in FORMS][-len(FORMS) :]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [getattr(call, form)() for form in FORMS]
    graph.replay()
    assert_same(results, expected)
