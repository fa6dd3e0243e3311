"""Experts with biases, and experts in MXFP4, in Triton against the dequantised weights in float64."""

from pathlib import Path

import pytest
import torch
from compiled_figures import compiled_figures
from torch import Tensor
from triton_layer_cases import assert_as_good_as_torch, everywhere, ignores_overflow, poisoned_memory, random

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, pack_exponents, pack_words
from octavo.gemm.expert_choice import Choice
from octavo.gemm.linear import PlainLinear
from octavo.gemm.portable.experts.expert_tiling import Mxfp4Tiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.experts import ListedExperts, combine
from octavo.layers.router import route_by_logits

pytestmark = ignores_overflow
ACTIVATION = "clamped_swiglu"


def make_mxfp4(number: int, rows: int, size: int, device: str, seed: int, *, bias: bool) -> Mxfp4ExpertWeight:
    """Any bytes, and exponents that make numbers of some hundredths."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (number * rows, size // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(118, 123, (number, rows, size // 32), generator=generator, dtype=torch.uint8)
    made = Mxfp4ExpertWeight(
        size,
        torch.stack([pack_words(each) for each in values.view(number, rows, -1)]),
        torch.stack([pack_exponents(each) for each in exponents]),
        random(number, rows, device="cpu", seed=seed) if bias else None,
    )
    plain = Mxfp4Weight(values, exponents.flatten(0, 1)).dequantise().view(number, rows, size)
    assert torch.equal(made.dequantise(), plain)
    tensors = (made.words, made.exponents, made.bias)
    return Mxfp4ExpertWeight(size, *(None if each is None else each.to(device) for each in tensors))


def listed(gate_up: Tensor, down: Tensor, biases: tuple[Tensor | None, Tensor | None]) -> ListedExperts:
    linears = (
        [PlainLinear(w, None if bias is None else bias[i].to(w.dtype)) for i, w in enumerate(weights)]
        for weights, bias in zip((gate_up, down), biases, strict=True)
    )
    return ListedExperts(*linears, ACTIVATION)


def make_choice(num_tokens: int, num_experts: int, num_chosen: int, device: str) -> Choice:
    logits = random(num_tokens, num_experts, device="cpu")
    choice = route_by_logits(logits, num_chosen, renormalises=True)
    return Choice(choice.experts.to(device), choice.weights.to(device))


def check(stacked: StackedExperts, product: str, num_tokens: int, dtype: torch.dtype, device: str) -> None:
    num_experts, hidden, _ = stacked.down.shape
    choice = make_choice(num_tokens, num_experts, 2, device)
    x = random(num_tokens, hidden, device=device, dtype=dtype, seed=3)
    residual = random(num_tokens, hidden + 2, device=device, dtype=dtype, seed=4)[:, :hidden]
    weights = stacked.gate_up.dequantise(), stacked.down.dequantise()
    biases = stacked.gate_up.bias, stacked.down.bias
    exact = listed(*(w.double() for w in weights), biases)(x.double(), choice, residual.double().contiguous())
    plain = listed(*(w.to(dtype) for w in weights), biases)(x, choice, residual.clone())
    run = stacked.few if product == "few" else stacked.grouped
    with poisoned_memory():
        got = run(x, choice, residual)
    assert got is residual
    assert_as_good_as_torch(got, plain, exact)


@everywhere
@pytest.mark.parametrize(("product", "num_tokens"), [("few", 1), ("few", 3), ("grouped", 5), ("grouped", 20)])
def test_mxfp4_experts(device: str, dtype: torch.dtype, product: str, num_tokens: int) -> None:
    # Neither rows nor columns fill tiles; a row ends in the middle of a tile of blocks.
    gate_up = make_mxfp4(3, 2 * 32, 96, device, 1, bias=True)
    down = make_mxfp4(3, 96, 32, device, 2, bias=num_tokens != 3)
    check(StackedExperts(gate_up, down, ACTIVATION), product, num_tokens, dtype, device)


@everywhere
@pytest.mark.parametrize(("product", "num_tokens"), [("few", 2), ("grouped", 9)])
def test_experts_with_biases(device: str, dtype: torch.dtype, product: str, num_tokens: int) -> None:
    shapes = ((3, 48, 40), (3, 40, 24))
    gate_up, down = (
        ExpertWeight(
            random(*shape, device=device, dtype=dtype, seed=seed) / 4,
            bias=random(*shape[:2], device=device, dtype=dtype, seed=seed + 2),
        )
        for seed, shape in enumerate(shapes)
    )
    check(StackedExperts(gate_up, down, ACTIVATION), product, num_tokens, dtype, device)


@everywhere
@pytest.mark.parametrize("tiling", [Mxfp4Tiling(16, 32, 1, 4, 2), Mxfp4Tiling(8, 32, 4, 4, 3)])
def test_any_tiling_computes_the_same(device: str, dtype: torch.dtype, tiling: Mxfp4Tiling) -> None:
    from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    gate_up, down = (make_mxfp4(3, rows, 64, device, 1, bias=False) for rows in (128, 64))
    choice, x = make_choice(50, 3, 2, device), random(50, 64, device=device, dtype=dtype, seed=3)
    by_expert = sort_pairs(choice.experts, 3, 2)
    with poisoned_memory():
        inner = grouped_gemm(x, gate_up, by_expert, ACTIVATION, tiling)
        rows = grouped_gemm(inner, down, by_expert, None, tiling)
    weights = gate_up.dequantise(), down.dequantise()
    exact = listed(*(w.double() for w in weights), (None, None))(x.double(), choice)
    plain = listed(*(w.to(dtype) for w in weights), (None, None))(x, choice)
    assert_as_good_as_torch(combine(rows.view(50, 2, -1), choice.weights), plain, exact)


@everywhere
@pytest.mark.parametrize("product", ["few", "grouped"])
def test_every_exponent_counts(device: str, dtype: torch.dtype, product: str) -> None:
    """From 2 ** -128 to the largest that is supported."""
    if dtype != torch.float32:
        pytest.skip("other dtypes have no such numbers, or sums")
    exponents = torch.tensor([0, 1, 60, 99, 118, 126, 127, 128], dtype=torch.uint8)
    down = make_mxfp4(1, 64, 256, device, 2, bias=False)
    packed = pack_exponents(exponents.expand(64, 8)).unsqueeze(0).contiguous()
    down = Mxfp4ExpertWeight(256, down.words, packed.to(device))
    weight = down.dequantise()[0]
    choice = Choice(torch.zeros(8, 1, dtype=torch.int32, device=device), torch.ones(8, 1, device=device))
    # A token for each block: no sum has numbers of several exponents.
    x = torch.block_diag(*random(8, 32, device=device).unsqueeze(1))
    if product == "few":
        from octavo.gemm.portable.experts.expert_tiling import MXFP4_FEW_TILING
        from octavo.gemm.portable.experts.grouped_gemm import pair_down

        got = pair_down(x, down, choice, None, MXFP4_FEW_TILING)
    else:
        from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs

        by_expert = sort_pairs(choice.experts, 1, 1)
        got = grouped_gemm(x, down, by_expert, None, Mxfp4Tiling(16, 64, 1, 4, 2))
    exact = x.double() @ weight.double().T
    error = (got.double() - exact).abs().amax(1) / exact.abs().amax(1)
    assert bool((error < 1e-6).all()), error


@everywhere
def test_a_bias_chooses_experts(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits, bias = random(6, 12, device=device), 3 * random(12, device=device, seed=1).to(dtype)
    logits[1] = -bias.float()
    expected = route_by_logits(logits + bias.float(), 4, renormalises=True)
    experts, weights = route_experts(logits, 4, renormalises=True, bias=bias)
    assert torch.equal(experts, expected.experts)
    torch.testing.assert_close(weights, expected.weights)


def test_kernels_of_4_bits_fit_a_hopper_gpu() -> None:
    """Two numbers a register stay where they are: moving them took as long as all the rest."""
    compiled = compiled_figures(Path(__file__).with_name("compile_experts.py"))
    found = compiled["4 bits"]
    assert len(found) == 6
    for name, facts in found.items():
        assert facts["stack"] == 0, name
        # Two programs on an SM.
        assert facts["shared"] <= 113 * 1024, name
        # Of packed words lower and upper halves of two become a register each, in each of two groups.
        assert facts["moves"] <= (80 if name == "few, packed" else 40), name
    assert [facts["stack"] for facts in compiled["some experts elsewhere"]] == [0] * 6
