"""gpt-oss on a real GPU: experts of its shapes in MXFP4, attention with sinks by every kernel, an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_checkpoints import TINY, make_tensors, write_folder
from overlaps import check_overlap
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch, poisoned_memory

from octavo import LLM, SamplingParams
from octavo.attention import AttentionMetadata, LayerCache, paged_attention
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, pack_exponents, pack_words
from octavo.gemm.expert_choice import Choice
from octavo.gemm.linear import PlainLinear
from octavo.gemm.portable.experts.expert_tiling import Mxfp4Tiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers import RMSNorm
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.layers.experts import ListedExperts
from octavo.layers.router import Router, route_by_logits
from octavo.parallel import TensorParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]
needs_hopper = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
# gpt-oss: experts (fewer than it has), chosen experts, hidden size, size of an expert.
NUMBER, CHOSEN, HIDDEN, INNER = 8, 4, 2880, 2880


def make_weight(rows: int, size: int, seed: int) -> Mxfp4ExpertWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    values = torch.randint(256, (NUMBER, rows, size // 2), dtype=torch.uint8, **options)
    exponents = torch.randint(118, 122, (NUMBER, rows, size // 32), dtype=torch.uint8, **options)
    return Mxfp4ExpertWeight(
        size,
        torch.stack([pack_words(each) for each in values]),
        torch.stack([pack_exponents(each) for each in exponents]),
        torch.randn(NUMBER, rows, **options).bfloat16(),
    )


@pytest.fixture(scope="module")
def experts() -> StackedExperts:
    return StackedExperts(make_weight(2 * INNER, HIDDEN, 1), make_weight(HIDDEN, INNER, 2), "clamped_swiglu")


def listed(experts: StackedExperts, dtype: torch.dtype) -> ListedExperts:
    """The specification."""

    def layers(weight: Any) -> list[PlainLinear]:
        biases = [None] * NUMBER if weight.bias is None else weight.bias.to(dtype)
        return [PlainLinear(w.to(dtype), b) for w, b in zip(weight.dequantise(), biases, strict=True)]

    return ListedExperts(layers(experts.gate_up), layers(experts.down), experts.activation)


def make_choice(num_tokens: int) -> Choice:
    logits = torch.randn(num_tokens, NUMBER, generator=torch.Generator().manual_seed(num_tokens)).cuda()
    return route_by_logits(logits, CHOSEN, renormalises=True)


def rows(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 40, 128, 300, 1500])
def test_experts_of_gpt_oss(experts: StackedExperts, num_tokens: int) -> None:
    choice, x, residual = make_choice(num_tokens), rows(num_tokens), rows(num_tokens).flip(1)
    expected = listed(experts, torch.bfloat16)(x, choice, residual.clone())
    exact = listed(experts, torch.float32)(x.float(), choice, residual.float())
    for run in (experts.few, experts.grouped):
        if num_tokens <= 16 or run == experts.grouped:
            assert_as_good_as_torch(run(x, choice, residual.clone()), expected, exact.double())


@needs_hopper
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 40, 70, 128, 300, 1500])
def test_experts_of_gpt_oss_by_programs_that_stay(experts: StackedExperts, num_tokens: int) -> None:
    choice, x, residual = make_choice(num_tokens), rows(num_tokens), rows(num_tokens).flip(1)
    expected = listed(experts, torch.bfloat16)(x, choice, residual.clone())
    exact = listed(experts, torch.float32)(x.float(), choice, residual.float())
    with poisoned_memory():
        got = experts.persistent(x, choice, residual.clone())
    assert_as_good_as_torch(got, expected, exact.double())


@needs_hopper
def test_programs_that_stay_skip_experts_of_other_ranks(experts: StackedExperts) -> None:
    """And those that nobody chose; one has most rows."""
    chosen = torch.tensor([[3, NUMBER, 7, 2], [3, NUMBER, NUMBER, NUMBER]]).repeat(100, 1).int().cuda()
    choice = Choice(chosen, torch.rand(200, 4, generator=torch.Generator().manual_seed(5)).cuda())
    skips = replace(experts, num_elsewhere=4)
    with poisoned_memory():
        got = skips.persistent(rows(200), choice)
    torch.testing.assert_close(got, skips.grouped(rows(200), choice), atol=0.3, rtol=2e-2)


@needs_hopper
@pytest.mark.parametrize(("hidden", "inner", "num_chosen"), [(512, 64, 2), (2048, 768, 8), (192, 1024, 5)])
@pytest.mark.parametrize("num_tokens", [7, 100, 700])
def test_programs_that_stay_and_other_shapes(
    num_tokens: int, hidden: int, inner: int, num_chosen: int
) -> None:
    """Of K that ends in the middle of a span, and N that fills no tile; without biases."""
    shapes = ((2 * inner, hidden, 1), (hidden, inner, 2))
    experts = StackedExperts(*(replace(make_weight(*shape), bias=None) for shape in shapes), "silu")
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num_tokens, hidden, generator=generator).cuda().bfloat16()
    logits = torch.randn(num_tokens, NUMBER, generator=generator).cuda()
    choice = route_by_logits(logits, num_chosen, renormalises=True)
    exact = listed(experts, torch.float32)(x.float(), choice).double()
    got = experts.persistent(x, choice)
    assert_as_good_as_torch(got, listed(experts, torch.bfloat16)(x, choice), exact)


@needs_hopper
@pytest.mark.parametrize("chosen", [[3, 0, 7, 5], [7, 7, 0, 0], [1, 2, 6, 4]])
@pytest.mark.parametrize("biased", [True, False])
def test_a_single_token_by_the_gemv(experts: StackedExperts, chosen: list[int], biased: bool) -> None:
    if not biased:
        experts = replace(
            experts, gate_up=replace(experts.gate_up, bias=None), down=replace(experts.down, bias=None)
        )
    weights = torch.tensor([[0.5, 0.3, 0.125, 0.075]], device="cuda")
    choice, x, residual = Choice(torch.tensor([chosen], device="cuda").int(), weights), rows(1), rows(1)
    expected = listed(experts, torch.bfloat16)(x, choice, residual.clone())
    exact = listed(experts, torch.float32)(x.float(), choice, residual.float())
    with poisoned_memory():
        got = experts.gemv(x, choice, residual.clone())
    assert_as_good_as_torch(got, expected, exact.double())
    apart = listed(experts, torch.float32)(x.float(), choice)
    assert_as_good_as_torch(
        experts.gemv(x, choice), listed(experts, torch.bfloat16)(x, choice), apart.double()
    )


@needs_hopper
def test_the_gemv_skips_experts_of_other_ranks(experts: StackedExperts) -> None:
    """Such a pair counts nothing, whatever lies behind the last expert."""
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.1]], device="cuda")
    some = Choice(torch.tensor([[3, NUMBER, 7, NUMBER]], device="cuda").int(), weights)
    skips = replace(experts, num_elsewhere=4)
    torch.testing.assert_close(skips.gemv(rows(1), some), skips.few(rows(1), some), atol=0.2, rtol=2e-2)


@needs_hopper
@pytest.mark.parametrize(("hidden", "inner", "num_chosen"), [(512, 96, 2), (2048, 768, 8), (160, 992, 6)])
def test_the_gemv_of_other_shapes(hidden: int, inner: int, num_chosen: int) -> None:
    """Of K that ends in the middle of a span, and N that fills no tile."""
    shapes = ((2 * inner, hidden, 1), (hidden, inner, 2))
    experts = StackedExperts(*(make_weight(*shape) for shape in shapes), "silu")
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, hidden, generator=generator).cuda().bfloat16()
    chosen = torch.randperm(NUMBER, generator=generator)[:num_chosen].int()[None].cuda()
    choice = Choice(chosen, torch.full((1, num_chosen), 1 / num_chosen, device="cuda"))
    exact = listed(experts, torch.float32)(x.float(), choice).double()
    assert_as_good_as_torch(experts.gemv(x, choice), listed(experts, torch.bfloat16)(x, choice), exact)


@needs_hopper
def test_every_exponent_counts_in_the_gemv() -> None:
    """Of those that leave results which bfloat16 holds."""
    exponents = torch.tensor([1, 30, 60, 99, 118, 126, 127, 128], dtype=torch.uint8, device="cuda")
    weight = make_weight(64, 256, 5)
    packed = pack_exponents(exponents.expand(64, 8)).unsqueeze(0).expand(NUMBER, -1, -1).contiguous()
    down = Mxfp4ExpertWeight(256, weight.words, packed)
    choice = Choice(torch.tensor([[2, 1]], device="cuda").int(), torch.tensor([[1.0, 0.0]], device="cuda"))
    from octavo.gemm.hopper.mxfp4.mxfp4_gemv import gemv

    for block in range(8):
        x = torch.zeros(2, 256, device="cuda")
        x[:, 32 * block : 32 * block + 32] = torch.randn(32, device="cuda")
        x = x.bfloat16()
        got = x.new_empty(1, 64)
        gemv(x, down, choice, got, activation=None, adds=False)
        exact = down.dequantise()[2].double() @ x[0].double()
        assert (got[0].double() - exact).abs().max() <= 4e-3 * exact.abs().max(), block


@needs_hopper
def test_overlapping_kernels_of_a_single_token_give_the_same_bits(
    experts: StackedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router and experts of several layers, which choose anew each time."""
    norm = RMSNorm(torch.ones(HIDDEN, device="cuda"), 1e-6)
    routers = [torch.randn(NUMBER, HIDDEN, device="cuda").bfloat16() * 0.02 for _ in range(6)]
    blocks = [
        ExpertFeedForward(norm, Router(weight, CHOSEN, renormalises=True), experts, TensorParallel())
        for weight in routers
    ]
    start = rows(1)

    class Blocks:
        hidden = start.clone()

        def run(self) -> None:
            self.hidden.copy_(start)
            for block in blocks:
                block(self.hidden, None)

    check_overlap(Blocks(), monkeypatch)


@pytest.mark.parametrize(
    "tiling",
    [
        Mxfp4Tiling(8, 32, 4, 4, 3),
        Mxfp4Tiling(8, 128, 1, 4, 4),
        Mxfp4Tiling(16, 64, 1, 4, 3),
        Mxfp4Tiling(32, 256, 1, 8, 3),
        Mxfp4Tiling(128, 128, 1, 8, 3),
    ],
)
def test_tilings_agree(experts: StackedExperts, tiling: Mxfp4Tiling) -> None:
    from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    choice, x = make_choice(200), rows(200)
    by_expert = sort_pairs(choice.experts, NUMBER, 2)
    results = []
    for each in (Mxfp4Tiling(64, 128, 1, 4, 3), tiling):
        inner = grouped_gemm(x, experts.gate_up, by_expert, experts.activation, each)
        results.append(grouped_gemm(inner, experts.down, by_expert, None, each))
    torch.testing.assert_close(results[1], results[0], atol=0.3, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("query_len", [1, 200])
@pytest.mark.parametrize("num_sequences", [1, 40])
def test_sinks_of_gpt_oss(num_sequences: int, query_len: int, window: int | None) -> None:
    """64 heads of 64 dimensions over 8 key heads, as prompts and as tokens to decode."""
    torch.manual_seed(0)
    length, block, per_sequence = 700, 64, 11
    num_tokens = num_sequences * query_len
    q = torch.randn(num_tokens, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, num_sequences * per_sequence, block, 8, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(num_sequences + 1, device="cuda", dtype=torch.int32) * query_len
    positions = torch.arange(length - query_len, length, device="cuda", dtype=torch.int32)
    metadata = AttentionMetadata(
        cu_seqlens_q=starts,
        seq_lens=torch.full((num_sequences,), length, device="cuda", dtype=torch.int32),
        positions=positions.repeat(num_sequences),
        slot_mapping=torch.full((num_tokens,), -1, device="cuda"),
        block_table=torch.randperm(num_sequences * per_sequence, device="cuda").int().view(num_sequences, -1),
        max_query_len=query_len,
        max_seq_len=length,
    )
    sinks = 3 * torch.randn(64, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"scale": 0.125, "window": window, "sinks": sinks}
    cache, exact_cache = LayerCache(k, v), LayerCache(k.float(), v.float())
    got = paged_attention(q, cache, metadata, impl="triton", **options)
    exact = paged_attention(q.float(), exact_cache, metadata, impl="reference", **options)
    assert (got.float() - exact).abs().max() < 1e-2 * exact.abs().max()


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"share_prefixes": False}])
def test_an_engine_gives_the_tokens_of_a_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    """In float32 through graphs, long prompts, decoding and shared prefixes; float8 caches round alike."""
    fields = TINY | {"head_dim": 64, "sliding_window": 24}
    write_folder(tmp_path, fields, make_tensors(fields))
    prefix = [(7 * i) % 97 for i in range(300)]
    prompts = [[*prefix, i] for i in range(9)] + [[5], prefix[:77]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    # A CPU's kernel rounds rows to 8 bits, a GPU's do not.
    for device, quantization in (("cpu", "none"), ("cuda", "auto")):
        llm = LLM(
            str(tmp_path),
            device=device,
            quantization=quantization,
            dtype="float32",
            num_blocks=128,
            block_size=64,
            max_model_len=1024,
            **options,
        )
        assert ("mxfp4" in llm.engine.plan.quantised_bytes) == (quantization == "auto")
        llm.generate(prefix, params)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        llm.engine.close()
    same = sum(one == two for one, two in zip(*found, strict=True))
    assert same == len(prompts) if not options else same >= len(prompts) - 3
