"""The GEMV of 1 to 4 tokens' experts in floats, on a Hopper GPU, beside its specification."""

import pytest
import torch
from test_moe_gpu import SHAPE, assert_same_bits_in_a_graph, listed, make_choice, random, rounded
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch

from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.router import route_by_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_GPU or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU of Hopper's kind",
    ),
]


def make(number: int, hidden: int, inner: int, form: str = "float", dtype: torch.dtype = torch.bfloat16):
    """Random experts: floats, or float8 with a scale for a row, or for 128 numbers."""
    torch.manual_seed(0)
    gate_up = ExpertWeight(random(number, 2 * inner, hidden, scale=0.03, dtype=dtype))
    down = ExpertWeight(random(number, hidden, inner, scale=0.05, dtype=dtype))
    if form != "float":
        widths = (hidden, inner) if form == "float8" else (128, 128)
        gate_up, down = rounded(gate_up, widths[0]), rounded(down, widths[1])
    return StackedExperts(gate_up, down, "silu")


def choose(num_tokens: int, number: int, chosen: int) -> Choice:
    return route_by_logits(torch.randn(num_tokens, number, device="cuda"), chosen, renormalises=True)


@pytest.fixture(scope="module", params=["float", "float8", "float8_tiles"])
def experts(request: pytest.FixtureRequest) -> StackedExperts:
    number, _, hidden, inner = SHAPE
    return make(number, hidden, inner, request.param)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("adds", [False, True])
def test_experts_of_a_model(experts: StackedExperts, num_tokens: int, adds: bool) -> None:
    choice, x = make_choice(num_tokens), random(num_tokens, SHAPE[2])
    residual = random(num_tokens, SHAPE[2]) if adds else None

    def start() -> Tensor | None:
        return None if residual is None else residual.clone()

    expected = listed(experts, torch.bfloat16)(x, choice, start())
    exact = listed(experts, torch.float32)(x.float(), choice, None if residual is None else residual.float())
    assert_as_good_as_torch(experts.gemv(x, choice, start()), expected, exact.double())


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize(
    ("number", "chosen", "hidden", "inner"),
    [(8, 2, 1024, 3584), (64, 8, 2048, 1024), (5, 1, 256, 256), (16, 3, 512, 1280), (9, 6, 2048, 1536)],
)
@pytest.mark.parametrize("form", ["float", "float8", "float8_tiles"])
def test_other_shapes(num_tokens: int, number: int, chosen: int, hidden: int, inner: int, form: str) -> None:
    experts = make(number, hidden, inner, form)
    choice, x = choose(num_tokens, number, chosen), random(num_tokens, hidden)
    expected = listed(experts, torch.bfloat16)(x, choice)
    exact = listed(experts, torch.float32)(x.float(), choice)
    assert_as_good_as_torch(experts.gemv(x, choice), expected, exact.double())


@pytest.mark.parametrize("form", ["float", "float8"])
def test_float16(form: str) -> None:
    experts = make(16, 512, 768, form, torch.float16)
    choice, x = choose(2, 16, 4), random(2, 512, dtype=torch.float16)
    expected = listed(experts, torch.float16)(x, choice)
    exact = listed(experts, torch.float32)(x.float(), choice)
    assert_as_good_as_torch(experts.gemv(x, choice), expected, exact.double())


@pytest.mark.parametrize("form", ["float", "float8", "float8_tiles"])
def test_experts_of_other_ranks_count_nothing(form: str) -> None:
    whole = make(16, 512, 768, form)
    gate_up, down = (
        ExpertWeight(w.values[:6].clone(), None if w.scales is None else w.scales[:6].clone(), w.width)
        for w in (whole.gate_up, whole.down)
        if isinstance(w, ExpertWeight)
    )
    own = StackedExperts(gate_up, down, "silu", num_elsewhere=10)
    choice, x = choose(4, 16, 4), random(4, 512)
    some = Choice(choice.experts.clamp(max=6), choice.weights)
    torch.testing.assert_close(own.gemv(x, some), own.few(x, some), atol=0.05, rtol=2e-2)
    none = Choice(torch.full_like(choice.experts, 6), choice.weights)
    assert not own.gemv(x, none).any()


def test_rows_of_float8_experts_keep_their_own_power_of_two() -> None:
    """A token's numbers may be as large as bfloat16 holds; other tokens keep their bits."""
    experts = make(16, 512, 768, "float8")
    choice, x = choose(3, 16, 4), random(3, 512)
    alone = experts.gemv(x[2:].clone(), Choice(choice.experts[2:].clone(), choice.weights[2:].clone()))
    x[0] *= 1e12
    x[1] *= 1e-12
    got = experts.gemv(x, choice)
    assert got.isfinite().all()
    torch.testing.assert_close(got[2:], alone, atol=0, rtol=0)


def test_kernels_that_overlap_in_a_graph_give_the_same_bits(experts: StackedExperts) -> None:
    assert_same_bits_in_a_graph(experts, random(2, SHAPE[2]), make_choice(2))
