"""The GEMV of a single token's packed experts, on a Hopper GPU, beside its specification."""

import pytest
import torch
from packed_expert_cases import listed, packed_experts
from test_moe_gpu import assert_same_bits_in_a_graph, random
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch

from octavo.forms.packed_experts import PackedExpertWeight
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
# Experts, experts of the token, hidden size, size of an expert.
SHAPES = [
    (16, 8, 2048, 768),
    (8, 2, 1024, 3584),
    (12, 6, 2048, 1408),
    (5, 1, 128, 128),
    (9, 3, 640, 1280),
    (6, 4, 2944, 3968),
]


def make(number: int, hidden: int, inner: int) -> StackedExperts:
    form = {"bits": 4, "group": 128, "ordered": False}
    gate_up = packed_experts(number, 2 * inner, hidden, "cuda", **form, parts=2)
    down = packed_experts(number, hidden, inner, "cuda", **form, parts=1)
    return StackedExperts(gate_up, down, "silu")


def choose(number: int, chosen: int) -> Choice:
    torch.manual_seed(0)
    return route_by_logits(torch.randn(1, number, device="cuda"), chosen, renormalises=True)


def specification(experts: StackedExperts, dtype: torch.dtype):
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, PackedExpertWeight)
    assert isinstance(down, PackedExpertWeight)
    return listed(gate_up, down, dtype)


@pytest.mark.parametrize(("number", "chosen", "hidden", "inner"), SHAPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts(number: int, chosen: int, hidden: int, inner: int, adds: bool, dtype: torch.dtype) -> None:
    experts, choice = make(number, hidden, inner), choose(number, chosen)
    x = random(1, hidden, dtype=dtype)
    residual = random(1, hidden, dtype=dtype) if adds else None

    def start() -> Tensor | None:
        return None if residual is None else residual.clone()

    expected = specification(experts, dtype)(x, choice, start())
    exact = specification(experts, torch.float32)(
        x.float(), choice, None if residual is None else residual.float()
    )
    got = experts.gemv(x, choice, start())
    assert_as_good_as_torch(got, expected, exact.double())


def test_numbers_of_any_size() -> None:
    """The row's integers keep what counts, whatever power of two it is times."""
    experts, choice = make(16, 512, 768), choose(16, 4)
    x = random(1, 512)
    for factor in (1e-6, 1, 1e12):
        scaled = x * factor
        expected = specification(experts, torch.float32)(scaled.float(), choice)
        torch.testing.assert_close(
            experts.gemv(scaled, choice).float(),
            expected,
            rtol=0.02,
            atol=0.01 * expected.abs().max().item(),
        )


def test_experts_of_other_ranks_count_nothing() -> None:
    whole = make(16, 512, 768)
    gate_up, down = (
        PackedExpertWeight(
            4, w.size, w.group, w.words[:6].clone(), w.pairs[:6].clone(), w.factors[:6].clone(), None
        )
        for w in (whole.gate_up, whole.down)
        if isinstance(w, PackedExpertWeight)
    )
    own = StackedExperts(gate_up, down, "silu", num_elsewhere=10)
    choice, x = choose(16, 8), random(1, 512)
    some = Choice(choice.experts.clamp(max=6), choice.weights)
    torch.testing.assert_close(own.gemv(x, some), own.few(x, some), atol=0.05, rtol=2e-2)
    none = Choice(torch.full_like(choice.experts, 6), choice.weights)
    assert not own.gemv(x, none).any()


def test_scales_of_experts_nobody_chose_do_not_reach_the_sums() -> None:
    """Spans past the end of a short expert are those of no other one."""
    experts = make(5, 512, 384)
    assert isinstance(experts.down, PackedExpertWeight)
    choice = Choice(torch.tensor([[1, 3]], dtype=torch.int32, device="cuda"), torch.ones(1, 2, device="cuda"))
    x = random(1, 512)
    expected = experts.gemv(x, choice)
    for weight in (experts.gate_up, experts.down):
        assert isinstance(weight, PackedExpertWeight)
        for expert in (0, 2, 4):
            # Two times the float16 infinity.
            weight.pairs[expert] = 0x7C007C00
    torch.testing.assert_close(experts.gemv(x, choice), expected, atol=0, rtol=0)


def test_kernels_that_overlap_in_a_graph_give_the_same_bits() -> None:
    assert_same_bits_in_a_graph(make(16, 2048, 768), random(1, 2048), choose(16, 8))
