"""Experts in blocks by one call into C, beside their linear layers one by one."""

import math

import pytest
import torch
from torch import Tensor

from octavo.forms.blocks import BlockWeight
from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.gemm.cpu.block_linear import make_layer
from octavo.gemm.cpu.compiled_norm import compiled_layers
from octavo.gemm.cpu.library import compile_failure
from octavo.gemm.expert_choice import Choice
from octavo.gemm.linear import Linear, PlainLinear
from octavo.kernels.clamped_swiglu import NAME as CLAMPED
from octavo.layers.experts import ListedExperts
from octavo.layers.router import route_by_logits

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")
HIDDEN, INNER, NUMBER = 96, 64, 5


def layer(form: str, rows: int, columns: int, seed: int, *, biased: bool) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(rows, generator=generator) if biased else None
    if form == "mxfp4":
        values = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(122, 125, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        return make_layer([Mxfp4Weight(values, exponents)], bias)
    quants = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, columns // 32, generator=generator).half() / 300
    return make_layer([BlockWeight(8, quants, scales, None)], bias)


def make_experts(form: str = "q8_0", activation: str = "silu", *, biased: bool = True) -> ListedExperts:
    gate_up = [layer(form, 2 * INNER, HIDDEN, index, biased=biased) for index in range(NUMBER)]
    down = [layer(form, HIDDEN, INNER, 100 + index, biased=biased) for index in range(NUMBER)]
    return ListedExperts(gate_up, down, activation)


def make_choice(num_tokens: int, num_chosen: int, held: range | None = None) -> Choice:
    logits = torch.randn(num_tokens, NUMBER, generator=torch.Generator().manual_seed(7))
    return route_by_logits(logits, num_chosen, renormalises=True, held=held)


def rows(num_tokens: int, seed: int = 9) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["q8_0", "mxfp4"])
@pytest.mark.parametrize("activation", ["silu", CLAMPED])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 1), (1, 4), (3, 2), (40, 3)])
def test_the_same_as_layers_one_by_one(
    form: str, activation: str, biased: bool, num_tokens: int, num_chosen: int
) -> None:
    experts = make_experts(form, activation, biased=biased)
    assert experts._compiled is not None
    x, choice, residual = rows(num_tokens), make_choice(num_tokens, num_chosen), rows(num_tokens, 3)
    expected = experts.by_expert(x, choice)
    torch.testing.assert_close(experts(x, choice), expected, atol=1e-4, rtol=1e-4)
    added = residual.clone()
    assert experts(x, choice, added) is added
    torch.testing.assert_close(added, residual + expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_are_float32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    """Trap: in a buffer of 16-bit numbers C wrote beyond its end."""
    experts, x, choice = make_experts(), rows(40), make_choice(40, 3)
    expected = experts(x, choice)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(experts(x, choice), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_bit_of_a_token_depends_on_the_others_or_on_threads() -> None:
    experts, x, choice = make_experts(), rows(30), make_choice(30, 3)
    whole, num_threads = experts(x, choice), torch.get_num_threads()
    for first, last in ((0, 1), (7, 9), (11, 30)):
        part = Choice(*(each[first:last].contiguous() for each in choice))
        assert torch.equal(experts(x[first:last], part), whole[first:last])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(experts(x, choice), whole)
    finally:
        torch.set_num_threads(num_threads)


def test_pairs_of_other_ranks_count_nothing() -> None:
    """Also where a token has no expert here, and where none has."""
    experts = make_experts()
    x, elsewhere = rows(20), NUMBER
    choice = make_choice(20, 3)
    chosen = torch.where(choice.experts >= 3, elsewhere, choice.experts).to(torch.int32)
    chosen[4] = elsewhere
    some = Choice(chosen, choice.weights)
    torch.testing.assert_close(experts(x, some), experts.by_expert(x, some), atol=1e-4, rtol=1e-4)
    none = Choice(torch.full_like(chosen, elsewhere), choice.weights)
    assert torch.equal(experts(x, none), torch.zeros_like(x))
    assert experts(x[:0], Choice(chosen[:0], choice.weights[:0])).shape == (0, HIDDEN)


@pytest.mark.parametrize("activation", ["silu", CLAMPED])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_stays_in_its_token(value: float, activation: str) -> None:
    experts, x, choice = make_experts(activation=activation), rows(6), make_choice(6, 2)
    clean = experts(x, choice)
    x[2, 5] = value
    out = experts(x, choice)
    assert out[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_the_clamped_activation_of_any_number(size: int) -> None:
    """Through identities: of large, small and ordinary numbers, as in PyTorch."""
    from octavo.gemm.gated import activate_and_multiply

    numbers = torch.tensor([0.0, -0.0, 1.5, -3.0, 7.0, 7.5, 200.0, -200.0, 1e30, -1e30, 6.9, -6.9])
    x = torch.zeros(size, HIDDEN)
    x[:, 0] = numbers.repeat(9)[:size]
    one = torch.zeros(2 * INNER, HIDDEN, dtype=torch.int8)
    one[0, 0] = one[INNER, 0] = 1
    back = torch.zeros(HIDDEN, INNER, dtype=torch.int8)
    back[0, 0] = 1
    gate_up, down = (
        make_layer([BlockWeight(8, each, torch.ones(len(each), each.shape[1] // 32), None)], None)
        for each in (one, back)
    )
    experts = ListedExperts([gate_up], [down], CLAMPED)
    choice = Choice(torch.zeros(size, 1, dtype=torch.int32), torch.ones(size, 1))
    expected = activate_and_multiply(x[:, :1].repeat(1, 2), CLAMPED)
    torch.testing.assert_close(experts(x, choice)[:, :1], expected, rtol=1e-5, atol=1e-6)


def test_other_layers_and_activations_run_one_by_one() -> None:
    experts = make_experts(activation="gelu")
    assert experts._compiled is None
    assert experts(rows(2), make_choice(2, 2)).shape == (2, HIDDEN)
    plain = [PlainLinear(torch.randn(2 * INNER, HIDDEN), None) for _ in range(NUMBER)]
    assert ListedExperts(plain, make_experts().down, "silu")._compiled is None


@pytest.mark.parametrize("gate", [-87.5, -1e3, -1e36, -3e38, -math.inf, math.inf, math.nan])
def test_silu_of_huge_gates_is_torchs_in_every_column(gate: float) -> None:
    """37 columns: whole vectors, and the rest one by one."""
    gate_up = torch.cat((torch.full((2, 37), gate), torch.rand(2, 37) + 0.5), 1)
    expected = torch.nn.functional.silu(gate_up[:, :37]) * gate_up[:, 37:]
    torch.testing.assert_close(
        compiled_layers().silu_and_multiply(gate_up), expected, rtol=1e-5, atol=1e-30, equal_nan=True
    )
