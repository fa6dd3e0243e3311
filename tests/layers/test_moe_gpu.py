"""Mixtures of experts on a real GPU: the shapes of models, CUDA graphs, kernels that overlap, engines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch

from octavo import LLM, SamplingParams
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.linear import PlainLinear
from octavo.gemm.portable.experts.expert_tiling import GroupedTiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.kernels import launch as triton_launch
from octavo.layers import RMSNorm
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.layers.experts import ListedExperts
from octavo.layers.router import Router, route_by_logits
from octavo.parallel import TensorParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]
# Qwen3-30B-A3B: experts, chosen experts, hidden size, size of an expert.
SHAPE = (128, 8, 2048, 768)


def random(*sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


@pytest.fixture(scope="module")
def experts() -> StackedExperts:
    torch.manual_seed(0)
    number, _, hidden, inner = SHAPE
    gate_up, down = random(number, 2 * inner, hidden, scale=0.03), random(number, hidden, inner, scale=0.05)
    return StackedExperts(ExpertWeight(gate_up), ExpertWeight(down), "silu")


def rounded(weight: ExpertWeight, width: int) -> ExpertWeight:
    """Float8 numbers, a scale for `width` of a row."""
    parts = weight.values.unflatten(2, (-1, width))
    scales = parts.abs().amax(-1).float() / 448
    values = (parts / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)
    return ExpertWeight(values, scales.transpose(1, 2).contiguous(), width)


def listed(experts: StackedExperts, dtype: torch.dtype) -> ListedExperts:
    """The specification."""

    def make(weight: Tensor) -> PlainLinear:
        return PlainLinear(weight, None)

    gate_up, down = (weight.dequantise().to(dtype) for weight in (experts.gate_up, experts.down))
    return ListedExperts([make(w) for w in gate_up], [make(w) for w in down], "silu")


def assert_same_bits_in_a_graph(experts: StackedExperts, x: Tensor, choice: Choice) -> None:
    """Of the GEMV, whose kernels overlap there."""
    expected = experts.gemv(x, choice)
    graph, residual = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        for _ in range(3):
            residual.zero_()
            experts.gemv(x, choice, residual)
            experts.gemv(x, choice, residual.zero_())
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(residual, expected, atol=0, rtol=0)


def make_choice(num_tokens: int, seed: int = 0) -> Choice:
    torch.manual_seed(seed)
    return route_by_logits(torch.randn(num_tokens, SHAPE[0], device="cuda"), SHAPE[1], renormalises=True)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 40, 128, 300, 1500])
def test_experts_of_a_model(experts: StackedExperts, num_tokens: int) -> None:
    choice, x = make_choice(num_tokens), random(num_tokens, SHAPE[2])
    residual = random(num_tokens, SHAPE[2])
    expected = listed(experts, torch.bfloat16)(x, choice, residual.clone())
    exact = listed(experts, torch.float32)(x.float(), choice, residual.float())
    for run in (experts.few, experts.grouped):
        if num_tokens <= 16 or run == experts.grouped:
            assert_as_good_as_torch(run(x, choice, residual.clone()), expected, exact.double())


@pytest.mark.parametrize("whole_rows", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 40, 300, 1500])
def test_float8_experts_of_a_model(experts: StackedExperts, num_tokens: int, whole_rows: bool) -> None:
    widths = (SHAPE[2], SHAPE[3]) if whole_rows else (128, 128)
    weights = (rounded(w, width) for w, width in zip((experts.gate_up, experts.down), widths, strict=True))
    float8 = StackedExperts(*weights, "silu")
    choice, x = make_choice(num_tokens), random(num_tokens, SHAPE[2])
    expected = listed(float8, torch.bfloat16)(x, choice)
    exact = listed(float8, torch.float32)(x.float(), choice)
    for run in (float8.few, float8.grouped):
        if num_tokens <= 16 or run == float8.grouped:
            assert_as_good_as_torch(run(x, choice), expected, exact.double())


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("tma", [False, True])
def test_tilings_agree(experts: StackedExperts, rows: int, tma: bool) -> None:
    from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    choice, x = make_choice(200), random(200, SHAPE[2])
    by_expert = sort_pairs(choice.experts, SHAPE[0], 2)
    results = []
    for tiling in (GroupedTiling(64, 64, 64, 4, 4, False), GroupedTiling(rows, 64, 64, 4, 4, tma)):
        inner = grouped_gemm(x, experts.gate_up, by_expert, "silu", tiling)
        results.append(grouped_gemm(inner, experts.down, by_expert, None, tiling))
    torch.testing.assert_close(results[1], results[0], atol=3e-2, rtol=2e-2)


def test_all_tokens_to_the_same_experts(experts: StackedExperts) -> None:
    chosen = torch.tensor([127, 5, 6, 7, 8, 9, 10, 0], dtype=torch.int32, device="cuda").expand(500, 8)
    choice = Choice(chosen.contiguous(), torch.full((500, 8), 0.125, device="cuda"))
    x = random(500, SHAPE[2])
    exact = listed(experts, torch.float32)(x.float(), choice)
    expected = listed(experts, torch.bfloat16)(x, choice)
    assert_as_good_as_torch(experts.grouped(x, choice), expected, exact.double())


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_router_agrees_with_its_specification(num_tokens: int) -> None:
    x, weight = random(num_tokens, SHAPE[2]), random(SHAPE[0], SHAPE[2], scale=0.02)
    for renormalises in (True, False):
        found = Router(weight, SHAPE[1], renormalises)(x)
        logits = x.double() @ weight.double().T
        expected = route_by_logits(logits.float(), SHAPE[1], renormalises=renormalises)
        assert (found.experts == expected.experts).float().mean() > 0.999
        torch.testing.assert_close(found.weights, expected.weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 128])
def test_overlapping_kernels_give_the_same_bits_in_and_out_of_graphs(
    experts: StackedExperts, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = RMSNorm(random(SHAPE[2]), 1e-6)
    routers = [Router(random(SHAPE[0], SHAPE[2], scale=0.02), SHAPE[1], renormalises=True) for _ in range(4)]
    blocks = [ExpertFeedForward(norm, router, experts, TensorParallel()) for router in routers]
    start = random(num_tokens, SHAPE[2])
    hidden = start.clone()

    def run() -> None:
        hidden.copy_(start)
        for block in blocks:
            block(hidden, None)

    monkeypatch.setattr(triton_launch, "OVERLAP", False)
    run()
    expected = hidden.clone()
    assert expected.isfinite().all()
    monkeypatch.setattr(triton_launch, "OVERLAP", True)
    run()
    assert torch.equal(hidden, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(hidden, expected)


def test_neighbours_change_no_bit_of_a_deterministic_layer(experts: StackedExperts) -> None:
    block = StackedExperts(experts.gate_up, experts.down, "silu", deterministic=True)
    router = Router(random(SHAPE[0], SHAPE[2], scale=0.02), SHAPE[1], True, deterministic=True)
    x = random(1500, SHAPE[2])
    choice = router(x)
    whole = block(x, choice)
    for num_tokens in (1, 3, 17, 130, 700):
        alone = router(x[:num_tokens])
        assert torch.equal(alone.experts, choice.experts[:num_tokens])
        assert torch.equal(alone.weights, choice.weights[:num_tokens])
        assert torch.equal(block(x[:num_tokens], alone), whole[:num_tokens])


# Heads as in test_late_work_gpu, so that attention is compiled once for both.
MODEL = {
    "vocab_size": 5003,
    "hidden_size": 1024,
    "intermediate_size": 1408,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "MixtralForCausalLM": {"num_local_experts": 16},
    "OlmoeForCausalLM": {"intermediate_size": 256},
}
PROMPTS = [
    [(7 * row + i) % 5000 for i in range(length)] for row, length in enumerate((1, 17, 64, 300, 9, 33))
]


def make_llm(folder: Path, family: str, **options: Any) -> LLM:
    fields = MODEL | FAMILIES[family] | {"architectures": [family]}
    (folder / "config.json").write_text(json.dumps(fields))
    return LLM(str(folder), load_format="dummy", num_blocks=256, block_size=16, max_num_seqs=16, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_give_the_log_probabilities_of_the_cpu(family: str, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    figures = []
    for options in ({"device": "cuda", "dtype": "float32"}, {"device": "cpu"}):
        llm = make_llm(tmp_path, family, **options)
        outputs = llm.generate(PROMPTS, params)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry]
        figures.append([value.logprob for entry in entries for value in entry.values()])
        llm.engine.close()
    assert figures[0] == pytest.approx(figures[1], abs=2e-2)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"quantization": "fp8"}], ids=str)
def test_a_ready_engine_leaves_nothing_for_later(options: dict[str, Any], tmp_path: Path) -> None:
    llm = make_llm(tmp_path, "Qwen3MoeForCausalLM", **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    together = llm.generate(PROMPTS, params)
    llm.reset_prefix_cache()
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert not any(llm.stats.late_work)
    if "deterministic" in options:
        assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]
    llm.engine.close()
