"""gpt-oss on a real GPU: experts of its shapes in MXFP4, attention with sinks by every kernel, an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_checkpoints import TINY, make_tensors, write_folder
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch

from octavo import LLM, SamplingParams
from octavo.attention import AttentionMetadata, LayerCache, paged_attention
from octavo.layers.linear.plain import PlainLinear
from octavo.layers.moe.experts import ListedExperts
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight, pack_exponents, pack_words
from octavo.layers.moe.router import Choice, choose_by_logits
from octavo.layers.moe.stacked import StackedExperts
from octavo.layers.moe.tiling import Mxfp4Tiling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]
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
        return [
            PlainLinear(w.to(dtype), b.to(dtype))
            for w, b in zip(weight.dequantise(), weight.bias, strict=True)
        ]

    return ListedExperts(layers(experts.gate_up), layers(experts.down), experts.activation)


def make_choice(num_tokens: int) -> Choice:
    logits = torch.randn(num_tokens, NUMBER, generator=torch.Generator().manual_seed(num_tokens)).cuda()
    return choose_by_logits(logits, CHOSEN, renormalises=True)


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
    from octavo.layers.moe.triton.mxfp4_gemm import grouped_gemm
    from octavo.layers.moe.triton.sort import sort_pairs

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
    for device in ("cpu", "cuda"):
        llm = LLM(
            str(tmp_path),
            device=device,
            dtype="float32",
            num_blocks=128,
            block_size=64,
            max_model_len=1024,
            **options,
        )
        assert "mxfp4" in llm.engine.plan.quantised_bytes
        llm.generate(prefix, params)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        llm.engine.close()
    same = sum(one == two for one, two in zip(*found, strict=True))
    assert same == len(prompts) if not options else same >= len(prompts) - 3
