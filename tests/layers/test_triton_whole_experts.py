"""A rank's whole experts in Triton: pairs of other ranks' experts are skipped, in any form of weights."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from packed_expert_cases import listed as listed_packed
from packed_expert_cases import packed_experts
from test_triton_moe import listed, make_weights, rounded
from test_triton_mxfp4 import ACTIVATION, make_mxfp4
from test_triton_mxfp4 import listed as listed_with_biases
from torch import Tensor
from triton_layer_cases import assert_as_good_as_torch, everywhere, ignores_overflow, poisoned_memory, random

from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.experts import ListedExperts
from octavo.layers.router import route_by_logits

# Rows of pairs that are elsewhere are not set, and become float8 like others.
pytestmark = [ignores_overflow, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]
# Of seven experts this rank has three.
NUM_EXPERTS, HELD = 7, range(2, 5)
NUM_ELSEWHERE = NUM_EXPERTS - len(HELD)
HIDDEN, INNER = 128, 64
# The experts, and the same in floats of a dtype.
Made = tuple[StackedExperts, Callable[[torch.dtype], ListedExperts]]


def make_plain(device: str, dtype: torch.dtype) -> Made:
    """With biases, of which those of no other expert may be read."""
    weights = make_weights(len(HELD), INNER, HIDDEN, device, dtype)
    biases = [
        random(len(HELD), each.shape[1], device=device, dtype=dtype, seed=n) for n, each in enumerate(weights)
    ]
    stacked = [ExpertWeight(weight, bias=bias) for weight, bias in zip(weights, biases, strict=True)]
    stacked = [ExpertWeight(before_nans(each.values), bias=before_nans(each.bias)) for each in stacked]
    return StackedExperts(stacked[0], stacked[1], ACTIVATION, num_elsewhere=NUM_ELSEWHERE), (
        lambda wanted: listed_with_biases(*(w.to(wanted) for w in weights), (biases[0], biases[1]))
    )


def before_nans(tensor: Tensor) -> Tensor:
    """The same numbers of all experts, with NaN behind them."""
    return torch.cat((tensor, torch.full_like(tensor[:1], torch.nan)))[:-1]


def make_float8(device: str, dtype: torch.dtype) -> Made:
    gate_up, down = (rounded(w, 128) for w in make_weights(len(HELD), INNER, HIDDEN, device, dtype))
    gate_up, down = (replace(weight, scales=before_nans(weight.scales)) for weight in (gate_up, down))
    return StackedExperts(gate_up, down, "silu", num_elsewhere=NUM_ELSEWHERE), (
        lambda wanted: listed(gate_up.dequantise().to(wanted), down.dequantise().to(wanted))
    )


def make_4_bits(device: str, dtype: torch.dtype) -> Made:
    gate_up = make_mxfp4(len(HELD), 2 * INNER, HIDDEN, device, 1, bias=True)
    down = make_mxfp4(len(HELD), HIDDEN, INNER, device, 2, bias=True)
    return StackedExperts(gate_up, down, ACTIVATION, num_elsewhere=NUM_ELSEWHERE), (
        lambda wanted: listed_with_biases(
            gate_up.dequantise().to(wanted), down.dequantise().to(wanted), (gate_up.bias, down.bias)
        )
    )


def make_packed(device: str, dtype: torch.dtype) -> Made:
    options = {"bits": 4, "group": 32, "ordered": False}
    gate_up = packed_experts(len(HELD), 2 * INNER, HIDDEN, device, **options, parts=2)
    down = packed_experts(len(HELD), HIDDEN, INNER, device, **options, parts=1)
    return StackedExperts(gate_up, down, "silu", num_elsewhere=NUM_ELSEWHERE), (
        lambda wanted: listed_packed(gate_up, down, wanted)
    )


def make_choice(num_tokens: int, device: str) -> Choice:
    """The first token has no expert here."""
    logits = random(num_tokens, NUM_EXPERTS, device="cpu", seed=6)
    logits[0, HELD.start : HELD.stop] = -100.0
    choice = route_by_logits(logits, 3, renormalises=True, held=HELD)
    return Choice(choice.experts.to(device), choice.weights.to(device))


@everywhere
@pytest.mark.parametrize("make", [make_plain, make_float8, make_4_bits, make_packed])
@pytest.mark.parametrize(
    ("num_tokens", "deterministic"), [(1, False), (3, False), (3, True), (40, False)], ids=str
)
def test_a_rank_adds_up_its_own_experts(
    device: str, dtype: torch.dtype, make: Callable[[str, torch.dtype], Made], num_tokens: int,
    deterministic: bool,
) -> None:  # fmt: skip
    if dtype == torch.float32 and make in (make_float8, make_packed):
        pytest.skip("such weights are for half precision")
    if deterministic and make is not make_plain:
        pytest.skip("quantised weights have no such mode")
    stacked, in_floats = make(device, dtype)
    if deterministic:
        stacked = replace(stacked, deterministic=True)
    choice = make_choice(num_tokens, device)
    x = random(num_tokens, HIDDEN, device=device, dtype=dtype, seed=3)
    exact = in_floats(torch.float64)(x.double(), choice)
    plain = in_floats(dtype)(x, choice)
    with poisoned_memory():
        got = stacked(x, choice)
    if make is make_float8 and num_tokens == 40 and not deterministic:
        # Rows are rounded to float8, too.
        assert (got.double() - exact).abs().max() < 0.1 * exact.abs().max()
    else:
        assert_as_good_as_torch(got, plain, exact)
    assert not bool(got[0].any())


@everywhere
def test_neighbours_change_no_bit_of_a_deterministic_layer(device: str, dtype: torch.dtype) -> None:
    stacked, _ = make_plain(device, dtype)
    stacked = replace(stacked, deterministic=True)
    choice, x = make_choice(40, device), random(40, HIDDEN, device=device, dtype=dtype, seed=3)
    whole = stacked(x, choice)
    for num_tokens in (1, 4, 17):
        part = Choice(*(tensor[:num_tokens].contiguous() for tensor in choice))
        assert torch.equal(stacked(x[:num_tokens], part), whole[:num_tokens])


@everywhere
def test_pairs_of_other_ranks_are_in_no_list(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    experts = make_choice(40, device).experts
    with poisoned_memory():
        pairs, starts, *_ = sort_pairs(experts, len(HELD), num_slots=1)
    flat = experts.flatten().long()
    assert starts.tolist() == [0, *flat.bincount(minlength=4)[: len(HELD)].cumsum(0).tolist()]
    end = starts[-1].item()
    assert 0 < end < len(flat)
    assert torch.equal(pairs[:end].long(), flat.argsort(stable=True)[:end])


@everywhere
@pytest.mark.parametrize("held", [range(3), range(2, 5), range(5, 7), range(7)], ids=str)
def test_a_choice_by_the_numbers_of_a_rank(device: str, dtype: torch.dtype, held: range) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits = random(9, NUM_EXPERTS, device=device)
    everyone = route_by_logits(logits, 3, renormalises=True)
    with poisoned_memory():
        experts, weights = route_experts(logits, 3, renormalises=True, held=held)
    expected = [[held.index(e) if e in held else len(held) for e in row] for row in everyone.experts.tolist()]
    assert experts.tolist() == expected
    torch.testing.assert_close(weights, everyone.weights)
    assert route_by_logits(logits, 3, renormalises=True, held=held).experts.tolist() == expected


@everywhere
@pytest.mark.parametrize("held", [None, range(2, 5)], ids=str)
def test_padding_has_no_experts(device: str, dtype: torch.dtype, held: range | None) -> None:
    from octavo.gemm.portable.experts.router_logits import route_experts

    logits = random(9, NUM_EXPERTS, device=device)
    slots = torch.tensor([7, -1, 0, 5, -1, 1, 2, 3, -1], dtype=torch.int32, device=device)
    expected = route_by_logits(logits, 3, renormalises=True, held=held, slots=slots)
    nobody = NUM_EXPERTS if held is None else len(held)
    assert (expected.experts[slots < 0] == nobody).all()
    with poisoned_memory():
        experts, weights = route_experts(logits, 3, renormalises=True, held=held, slots=slots)
    assert torch.equal(experts, expected.experts)
    torch.testing.assert_close(weights, expected.weights)
    everyone = route_by_logits(logits, 3, renormalises=True, held=held)
    assert torch.equal(experts[slots >= 0], everyone.experts[slots >= 0])
