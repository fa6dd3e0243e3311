"""Mixtures of experts in plain PyTorch: the specification of the GPU's kernels, and what runs on a CPU."""

import pytest
import torch
from chosen_products import expert_product_name
from torch import Tensor
from torch.nn.functional import silu

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.linear import PlainLinear
from octavo.gemm.make_linear import make_linear
from octavo.gemm.portable.experts.expert_tiling import row_slots
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.layers.experts import ListedExperts, combine
from octavo.layers.norm import RMSNorm
from octavo.layers.router import Router, route_by_logits
from octavo.parallel import TensorParallel

NUM_EXPERTS, NUM_CHOSEN, HIDDEN, INNER = 6, 3, 48, 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_experts(quantization: str = "none") -> tuple[ListedExperts, Tensor, Tensor]:
    gate_up = random(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=1) / 4
    down = random(NUM_EXPERTS, HIDDEN, INNER, seed=2) / 4
    linears = [[make_linear(w, quantization=quantization) for w in weights] for weights in (gate_up, down)]
    return ListedExperts(*linears, "silu"), gate_up, down


def one_by_one(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every pair of a token and an expert by itself, in float64."""
    rows = []
    for row, experts, weights in zip(
        x.double(), choice.experts.tolist(), choice.weights.double(), strict=True
    ):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            total += weight * (down[expert].double() @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows).float()


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40])
def test_experts_against_every_pair_by_itself(num_tokens: int) -> None:
    experts, gate_up, down = make_experts()
    x = random(num_tokens, HIDDEN, seed=3)
    choice = Router(random(NUM_EXPERTS, HIDDEN, seed=4), NUM_CHOSEN, renormalises=False)(x)
    expected = one_by_one(x, choice, gate_up, down)
    torch.testing.assert_close(experts(x, choice), expected, atol=1e-4, rtol=1e-4)
    residual = random(num_tokens, HIDDEN, seed=5)
    before = residual.clone()
    assert experts(x, choice, residual) is residual
    torch.testing.assert_close(residual, before + expected, atol=1e-4, rtol=1e-4)


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    experts, gate_up, down = make_experts()
    x = random(11, HIDDEN, seed=3)
    choice = Choice(torch.full((11, 1), 4, dtype=torch.int32), torch.ones(11, 1))
    torch.testing.assert_close(experts(x, choice), one_by_one(x, choice, gate_up, down), atol=1e-4, rtol=1e-4)


def test_padding_has_no_experts() -> None:
    experts, _, _ = make_experts()
    router = Router(random(NUM_EXPERTS, HIDDEN, seed=4), NUM_CHOSEN, renormalises=True)
    x = random(6, HIDDEN, seed=3)
    slots = torch.tensor([0, -1, 4, 5, -1, 9])
    choice = router(x, slots)
    assert (choice.experts == NUM_EXPERTS).all(1).tolist() == (slots < 0).tolist()
    x[slots < 0] = torch.nan
    got = experts(x, choice)
    assert not got[slots < 0].any()
    torch.testing.assert_close(got[slots >= 0], experts(x[slots >= 0], router(x[slots >= 0])))


def test_a_block_leaves_padding_as_it_is() -> None:
    experts, _, _ = make_experts()
    router = Router(random(NUM_EXPERTS, HIDDEN, seed=4), NUM_CHOSEN, renormalises=True)
    block = ExpertFeedForward(RMSNorm(torch.ones(HIDDEN), 1e-6), router, experts, TensorParallel())
    hidden, slots = random(6, HIDDEN, seed=3), torch.tensor([0, -1, 4, 5, -1, 9])
    padded, tokens = hidden.clone(), hidden[slots >= 0]
    block(padded, None, slots)
    block(tokens, None)
    assert torch.equal(padded[slots < 0], hidden[slots < 0])
    torch.testing.assert_close(padded[slots >= 0], tokens)


def test_no_tokens() -> None:
    experts, _, _ = make_experts()
    router = Router(random(NUM_EXPERTS, HIDDEN), NUM_CHOSEN, renormalises=True)
    nothing = torch.empty(0, HIDDEN)
    assert experts(nothing, router(nothing)).shape == (0, HIDDEN)


def test_equal_logits_choose_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    choice = route_by_logits(logits, 4, renormalises=True)
    assert choice.experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert choice.weights[1].tolist() == [0.25] * 4


def test_weights_of_the_chosen() -> None:
    logits = random(5, NUM_EXPERTS)
    probabilities = logits.softmax(-1)
    kept = route_by_logits(logits, NUM_CHOSEN, renormalises=False)
    scaled = route_by_logits(logits, NUM_CHOSEN, renormalises=True)
    expected = probabilities.gather(1, kept.experts.long())
    torch.testing.assert_close(kept.weights, expected)
    torch.testing.assert_close(scaled.weights, expected / expected.sum(-1, keepdim=True))
    assert torch.equal(kept.weights, kept.weights.sort(-1, descending=True).values)


def test_the_router_is_exact_in_half_precision() -> None:
    """Logits that bfloat16 would round to the same number are told apart."""
    x, weight = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 0.0], [1.0, 2**-10]])
    choice = Router(weight.bfloat16(), 1, renormalises=False)(x)
    assert choice.experts.tolist() == [[1]]
    assert choice.weights.dtype == torch.float32


def test_sums_have_one_order() -> None:
    """Adding the same rows in another order gives other bits, and the choice gives the order."""
    rows = torch.tensor([1e8, 1.0, -1e8])[None, :, None]
    assert combine(rows, torch.ones(1, 3)).item() == 0.0
    assert combine(rows[:, [0, 2, 1]], torch.ones(1, 3)).item() == 1.0


def test_neighbours_change_no_bit_of_plain_layers() -> None:
    """Of one product per expert, rows are independent if those of its linear layers are."""
    _, gate_up, down = make_experts()

    def by_row(weight: Tensor):
        linear = PlainLinear(weight, None)
        return lambda x: torch.cat([linear(row[None]) for row in x]) if len(x) else linear(x)

    experts = ListedExperts([by_row(w) for w in gate_up], [by_row(w) for w in down], "silu")
    x = random(40, HIDDEN, seed=3)
    router = Router(random(NUM_EXPERTS, HIDDEN, seed=4), NUM_CHOSEN, renormalises=True)
    choice = router(x)
    whole = experts(x, choice)
    for num_tokens in range(1, 41):
        part = Choice(*(tensor[:num_tokens] for tensor in choice))
        assert torch.equal(experts(x[:num_tokens], part), whole[:num_tokens])


def test_int8_experts() -> None:
    exact, _, _ = make_experts()
    rounded, _, _ = make_experts("int8")
    x = random(9, HIDDEN, seed=3)
    choice = Router(random(NUM_EXPERTS, HIDDEN, seed=4), NUM_CHOSEN, renormalises=True)(x)
    expected = exact(x, choice)
    assert (rounded(x, choice) - expected).abs().max() < 0.05 * expected.abs().max()


def test_products_by_the_number_of_tokens() -> None:
    plain = ExpertWeight(torch.zeros(2, 8, 16))
    # In groups of half a plane, and of whole ones.
    small, packed = (PackedExpertWeight(4, 16, group, *(torch.zeros(2, 8),) * 3) for group in (16, 32))

    def products(weight: ExpertWeight | PackedExpertWeight, *, deterministic: bool = False) -> list[str]:
        options = {"rows_per_expert": 1000, "deterministic": deterministic}
        rows = (torch.zeros(number, 16) for number in (1, 2, 4, 5, 128))
        return [expert_product_name(x, (weight, weight), 2, **options) for x in rows]

    assert products(plain) == ["few"] * 3 + ["grouped"] * 2
    assert products(packed) == ["few"] * 2 + ["grouped"] * 3
    assert set(products(plain, deterministic=True)) == set(products(small)) == {"grouped"}


def test_slots_cover_what_an_expert_can_have() -> None:
    assert row_slots(4, 0.25, 16) == 1
    assert row_slots(128, 8.0, 16) == 2
    assert row_slots(8192, 512.0, 128) == 8
    # No expert has more rows than there are tokens.
    assert row_slots(100, 100.0, 64) == 2
