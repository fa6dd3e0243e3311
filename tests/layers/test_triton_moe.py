"""Mixtures of experts in Triton against plain torch."""

import pytest
import torch
from fewer import fewer
from torch import Tensor
from triton_layer_cases import assert_as_good_as_torch, everywhere, ignores_overflow, poisoned_memory, random

from octavo.forms.float8 import quantise_rows
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice, Scoring
from octavo.gemm.linear import PlainLinear
from octavo.gemm.portable.experts.expert_tiling import GroupedTiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.experts import ListedExperts, combine
from octavo.layers.router import route_by_logits

pytestmark = ignores_overflow


def make_choice(num_tokens: int, num_experts: int, num_chosen: int, device: str, seed: int = 0) -> Choice:
    logits = random(num_tokens, num_experts, device="cpu", seed=seed)
    choice = route_by_logits(logits, num_chosen, renormalises=True)
    return Choice(choice.experts.to(device), choice.weights.to(device))


def listed(gate_up: Tensor, down: Tensor) -> ListedExperts:
    return ListedExperts(
        [PlainLinear(w, None) for w in gate_up], [PlainLinear(w, None) for w in down], "silu"
    )


def make_weights(
    num_experts: int, inner: int, hidden: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    gate_up = random(num_experts, 2 * inner, hidden, device=device, dtype=dtype, seed=1) / 8
    return gate_up, random(num_experts, hidden, inner, device=device, dtype=dtype, seed=2) / 8


@everywhere
@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (60, 5), (128, 8), (3, 3), (1, 1)])
def test_choice_of_experts(
    device: str, dtype: torch.dtype, num_experts: int, num_chosen: int, renormalises: bool
) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits = random(7, num_experts, device=device)
    logits[1] = 0.0
    logits[2] = -0.0
    logits[2, num_experts // 2 :] = 0.0
    logits[3] = (logits[3] * 2).round()
    expected = route_by_logits(logits, num_chosen, renormalises=renormalises)
    with poisoned_memory():
        experts, weights = route_experts(logits, num_chosen, renormalises=renormalises)
    assert torch.equal(experts, expected.experts)
    torch.testing.assert_close(weights, expected.weights)


@everywhere
@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "groups"), [(60, 5, None), (24, 4, (4, 2)), (30, 8, (5, 3)), (8, 2, (4, 1))]
)
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_choice_by_scores(
    device: str,
    dtype: torch.dtype,
    num_experts: int,
    num_chosen: int,
    groups: tuple[int, int] | None,
    is_sigmoid: bool,
    renormalises: bool,
    factor: float,
) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits = random(7, num_experts, device=device) * 2
    logits[1] = 0.0
    # All sigmoids are 0.
    logits[2] = -200.0
    bias = random(num_experts, device=device, seed=5) / 4
    factors = random(num_experts, device=device, seed=6) + 1
    for scoring in (
        Scoring(is_sigmoid, bias, groups, factor),
        Scoring(is_sigmoid, None, groups, factor),
        Scoring(is_sigmoid, bias, groups, factor, factors),
    ):
        expected = route_by_logits(logits, num_chosen, renormalises=renormalises, scoring=scoring)
        with poisoned_memory():
            experts, weights = route_experts(logits, num_chosen, renormalises=renormalises, scoring=scoring)
        # Equal groups have no order.
        rows = slice(None) if groups is None or scoring.bias is not None else [0, 3, 4, 5, 6]
        assert torch.equal(experts[rows], expected.experts[rows])
        torch.testing.assert_close(weights[rows], expected.weights[rows])


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_choice_among_garbage_names_experts_that_exist(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits = torch.full((4, 5), torch.nan, device=device)
    logits[1, 2:] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    experts, _ = route_experts(logits, 3, renormalises=True)
    assert experts.min() >= 0
    assert experts.max() < 5


@everywhere
@pytest.mark.parametrize(("num_rows", "num_experts", "size"), [(1, 8, 64), (5, 60, 300), (20, 128, 64)])
def test_router_logits(device: str, dtype: torch.dtype, num_rows: int, num_experts: int, size: int) -> None:
    from octavo.gemm.portable.experts.router_logits import router_logits

    x = random(num_rows, size + 3, device=device, dtype=dtype)[:, :size]
    weight = random(num_experts, size, device=device, dtype=dtype, seed=1)
    exact = x.double() @ weight.double().T
    with poisoned_memory():
        got = router_logits(x, weight)
    assert_as_good_as_torch(got, x.float() @ weight.float().T, exact)
    alone, first = (router_logits(rows, weight, deterministic=True) for rows in (x[:1], x))
    assert torch.equal(alone, first[:1])


@everywhere
@pytest.mark.parametrize(("num_rows", "num_experts", "size"), [(1, 8, 64), (4, 60, 300), (3, 128, 2880)])
@pytest.mark.parametrize("biased", [True, False])
def test_norm_and_choice_in_one_kernel(
    device: str, dtype: torch.dtype, num_rows: int, num_experts: int, size: int, biased: bool
) -> None:
    """As by a kernel each."""
    from octavo.gemm.portable.experts.route_token import norm_and_route
    from octavo.gemm.portable.experts.router_logits import route_experts
    from octavo.kernels.rms_norm import rms_norm

    hidden = random(num_rows, size + 3, device=device, dtype=dtype)[:, :size]
    norm = random(size, device=device, seed=2)
    # A few multiples of a row: many logits are equal, and of these the lower experts are chosen.
    weight = random(1, size, device=device, dtype=dtype, seed=1).expand(num_experts, -1)
    factors = torch.arange(num_experts, device=device) * 7 % 5 - 2
    weight = (weight * factors[:, None]).to(dtype).contiguous()
    bias = random(num_experts, device=device, dtype=dtype, seed=3) if biased else None
    arrivals = torch.zeros(4, dtype=torch.int32, device=device)
    x = rms_norm(hidden, norm, 1e-6)
    padding = torch.tensor([3, -1, 0, -1][:num_rows], dtype=torch.int32, device=device)
    for renormalises, held, slots in ((True, None, padding), (False, range(2, 5), None)):
        options = {"renormalises": renormalises, "bias": bias, "held": held, "slots": slots}
        with poisoned_memory():
            got, experts, weights = norm_and_route(
                hidden, norm, 1e-6, weight, 3, **options, arrivals=arrivals
            )
        torch.testing.assert_close(got, x)
        logits = got.float() @ weight.float().T
        expected = route_experts(logits, 3, **options)
        torch.testing.assert_close(weights, expected[1], rtol=1e-4, atol=1e-6)
        if not biased:
            assert torch.equal(experts, expected[0])
        assert not arrivals.any()


@everywhere
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 700])
def test_pairs_are_sorted_by_expert(device: str, dtype: torch.dtype, num_tokens: int) -> None:
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    experts = make_choice(num_tokens, 7, 3, device).experts
    # An expert that nobody chose, first and last.
    experts = torch.where((experts == 0) | (experts == 6), 3, experts).to(torch.int32)
    with poisoned_memory():
        pairs, starts, *_ = sort_pairs(experts, 7, num_slots=1)
    flat = experts.flatten().long()
    assert torch.equal(pairs.long(), flat.argsort(stable=True))
    assert starts.tolist() == [0, *flat.bincount(minlength=7).cumsum(0).tolist()]


@everywhere
@fewer(("product", "num_tokens"), [("few", 3), ("few", 1), ("grouped", 5), ("grouped", 1), ("grouped", 40)])
@pytest.mark.parametrize(("num_experts", "num_chosen", "inner", "hidden"), [(4, 2, 12, 40), (6, 3, 24, 64)])
def test_experts(
    device: str, dtype: torch.dtype, num_tokens: int, num_experts: int, num_chosen: int, inner: int,
    hidden: int, product: str,
) -> None:  # fmt: skip
    gate_up, down = make_weights(num_experts, inner, hidden, device, dtype)
    choice = make_choice(num_tokens, num_experts, num_chosen, device)
    x = random(num_tokens, hidden, device=device, dtype=dtype, seed=3)
    residual = random(num_tokens, hidden + 2, device=device, dtype=dtype, seed=4)[:, :hidden]
    stacked = StackedExperts(ExpertWeight(gate_up), ExpertWeight(down), "silu")
    run = stacked.few if product == "few" else stacked.grouped
    exact = listed(gate_up.double(), down.double())(x.double(), choice, residual.double().contiguous())
    plain = listed(gate_up, down)(x, choice, residual.clone())
    with poisoned_memory():
        apart = run(x, choice)
        got = run(x, choice, residual)
    assert got is residual
    assert_as_good_as_torch(got, plain, exact)
    torch.testing.assert_close(
        apart, listed(gate_up, down)(x, choice), atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2
    )


@everywhere
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_any_tiling_computes_the_same(device: str, dtype: torch.dtype, num_slots: int, tma: bool) -> None:
    from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    gate_up, down = make_weights(3, 40, 72, device, dtype)
    choice, x = make_choice(50, 3, 2, device), random(50, 72, device=device, dtype=dtype, seed=3)
    by_expert = sort_pairs(choice.experts, 3, num_slots)
    tiling = GroupedTiling(16, 64, 32, 4, 2, tma)
    with poisoned_memory():
        inner = grouped_gemm(x, ExpertWeight(gate_up), by_expert, "silu", tiling)
        rows = grouped_gemm(inner, ExpertWeight(down), by_expert, None, tiling)
    exact = listed(gate_up.double(), down.double())(x.double(), choice)
    got = combine(rows.view(50, 2, -1), choice.weights)
    assert_as_good_as_torch(got, listed(gate_up, down)(x, choice), exact)


@everywhere
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_tokens_to_one_expert_and_none_to_others(
    device: str, dtype: torch.dtype, deterministic: bool
) -> None:
    gate_up, down = make_weights(4, 24, 40, device, dtype)
    experts = torch.tensor([[2, 0]] * 70, dtype=torch.int32, device=device)
    weights = torch.full((70, 2), 0.5, device=device)
    x = random(70, 40, device=device, dtype=dtype, seed=3)
    # Weights of experts that nobody chose are never read.
    gate_up[[1, 3]], down[[1, 3]] = torch.nan, torch.nan
    choice = Choice(experts, weights)
    got = StackedExperts(ExpertWeight(gate_up), ExpertWeight(down), "silu", deterministic)(x, choice)
    exact = listed(gate_up.double(), down.double())(x.double(), choice)
    assert_as_good_as_torch(got, listed(gate_up, down)(x, choice), exact)


@everywhere
def test_neighbours_change_no_bit_of_a_deterministic_layer(device: str, dtype: torch.dtype) -> None:
    gate_up, down = make_weights(4, 24, 40, device, dtype)
    choice = make_choice(20, 4, 2, device)
    x = random(20, 40, device=device, dtype=dtype, seed=3)
    experts = StackedExperts(ExpertWeight(gate_up), ExpertWeight(down), "silu", deterministic=True)
    whole = experts(x, choice)
    for num_tokens in (1, 4, 9):
        part = Choice(*(tensor[:num_tokens].contiguous() for tensor in choice))
        assert torch.equal(experts(x[:num_tokens], part), whole[:num_tokens])


def rounded(weight: Tensor, width: int) -> ExpertWeight:
    """Float8 numbers, a scale for `width` of a row."""
    size = weight.shape[2]
    padded = torch.nn.functional.pad(weight.float(), (0, -size % width)).unflatten(2, (-1, width))
    scales = padded.abs().amax(-1) / 448
    values = (padded / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)[..., :size]
    return ExpertWeight(values.contiguous(), scales.transpose(1, 2).contiguous(), width)


@everywhere
@fewer("width", [128, 256])
@pytest.mark.parametrize(("product", "num_tokens"), [("few", 2), ("grouped", 9)])
def test_float8_experts(device: str, dtype: torch.dtype, product: str, num_tokens: int, width: int) -> None:
    if dtype == torch.float32:
        pytest.skip("float8 weights are for half precision")
    hidden, inner = 256, 160
    plain = make_weights(3, inner, hidden, device, dtype)
    # Two scales a row, the last of few numbers in down; or one for the whole row.
    gate_up, down = (rounded(weight, width) for weight in plain)
    choice, x = (
        make_choice(num_tokens, 3, 2, device),
        random(num_tokens, hidden, device=device, dtype=dtype, seed=3),
    )
    stacked = StackedExperts(gate_up, down, "silu")
    with poisoned_memory():
        got = (stacked.few if product == "few" else stacked.grouped)(x, choice)
    exact = listed(gate_up.dequantise().double(), down.dequantise().double())(x.double(), choice)
    in_dtype = listed(gate_up.dequantise().to(dtype), down.dequantise().to(dtype))(x, choice)
    assert_as_good_as_torch(got, in_dtype, exact)


@everywhere
@fewer("width", [128, 256])
@pytest.mark.parametrize("num_tokens", [9, 150])
def test_float8_experts_with_rounded_rows(
    device: str, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    """Like the same rows, rounded, in float64; near those that are not rounded."""
    if dtype == torch.float32:
        pytest.skip("float8 weights are for half precision")
    hidden, inner = 256, 160
    gate_up, down = (rounded(weight, width) for weight in make_weights(3, inner, hidden, device, dtype))
    choice = make_choice(num_tokens, 3, 2, device)
    x = random(num_tokens, hidden, device=device, dtype=dtype, seed=3)
    residual = random(num_tokens, hidden, device=device, dtype=dtype, seed=4)
    with poisoned_memory():
        got = StackedExperts(gate_up, down, "silu").rounded(x, choice, residual.clone())
    weights = [weight.dequantise().double() for weight in (gate_up, down)]
    exact = listed(*weights)(x.double(), choice, residual.double())

    def round_rows(rows: Tensor) -> Tensor:
        values, scales = quantise_rows(rows.to(dtype))
        return values.double() * scales.double().view(-1, 1)

    expected = residual.double()
    for token, row in enumerate(round_rows(x)):
        for expert, factor in zip(choice.experts[token], choice.weights[token], strict=True):
            gate, up = (weights[0][expert] @ row).chunk(2)
            products = round_rows((torch.nn.functional.silu(gate) * up)[None]) @ weights[1][expert].T
            expected[token] += factor * products[0]
    scale, last_bit = (expected - residual).abs().max(), torch.finfo(dtype).eps * expected.abs().max()
    assert (got.double() - expected).abs().max() < 0.04 * scale + last_bit
    assert (got.double() - exact).abs().max() < 0.1 * scale + last_bit
