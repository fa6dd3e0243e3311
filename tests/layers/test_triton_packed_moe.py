"""Packed experts in Triton against plain torch over their numbers."""

import pytest
import torch
from packed_expert_cases import listed, packed_experts
from test_triton_moe import make_choice
from triton_layer_cases import (
    PLACES,
    assert_as_good_as_torch,
    ignores_overflow,
    poisoned_memory,
    random,
)

from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.expert_tiling import PackedTiling, packed_grouped_tiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.experts import combine

pytestmark = ignores_overflow
# Activations are of 16 bits.
places = pytest.mark.parametrize(
    ("device", "dtype"), [place for place in PLACES if place.values[1] != torch.float32]
)


@places
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize(
    ("bits", "group", "ordered"),
    [(4, 32, False), (4, 128, False), (4, 128, True), (8, 16, False), (8, 64, True)],
)
def test_experts(
    device: str, dtype: torch.dtype, bits: int, group: int, ordered: bool, num_tokens: int
) -> None:
    # Neither size is a multiple of a span or of a tile of columns, with all but the largest groups.
    hidden, inner = (256, 128) if group == 128 else (192, 64)
    options = {"bits": bits, "group": group, "ordered": ordered}
    gate_up = packed_experts(4, 2 * inner, hidden, device, **options, parts=2)
    down = packed_experts(4, hidden, inner, device, **options, parts=1)
    choice = make_choice(num_tokens, 4, 2, device)
    x = random(num_tokens, hidden + 3, device=device, dtype=dtype, seed=3)[:, :hidden]
    residual = random(num_tokens, hidden, device=device, dtype=dtype, seed=4)
    exact = listed(gate_up, down, torch.float64)(x.double(), choice, residual.double())
    plain = listed(gate_up, down, dtype)(x, choice, residual.clone())
    experts = StackedExperts(gate_up, down, "silu")
    with poisoned_memory():
        got = experts(x, choice, residual)
    assert got is residual
    assert_as_good_as_torch(got, plain, exact)


@places
@pytest.mark.parametrize("num_slots", [1, 2])
def test_any_tiling_computes_the_same(device: str, dtype: torch.dtype, num_slots: int) -> None:
    """Several tiles of rows for a program, and columns that no tile divides."""
    from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    options = {"bits": 4, "group": 32, "ordered": False}
    gate_up = packed_experts(3, 2 * 96, 72 * 4, device, **options, parts=2)
    down = packed_experts(3, 72 * 4, 96, device, **options, parts=1)
    choice, x = make_choice(40, 3, 2, device), random(40, 288, device=device, dtype=dtype, seed=3)
    by_expert = sort_pairs(choice.experts, 3, num_slots)
    tiling = PackedTiling(16, 128, 4, 2)
    with poisoned_memory():
        inner = grouped_gemm(x, gate_up, by_expert, "silu", tiling)
        rows = grouped_gemm(inner, down, by_expert, None, tiling)
    exact = listed(gate_up, down, torch.float64)(x.double(), choice)
    got = combine(rows.view(40, 2, -1), choice.weights)
    assert_as_good_as_torch(got, listed(gate_up, down, dtype)(x, choice), exact)


@places
def test_weights_of_experts_that_nobody_chose_are_never_read(device: str, dtype: torch.dtype) -> None:
    options = {"bits": 4, "group": 64, "ordered": False}
    gate_up = packed_experts(4, 128, 128, device, **options, parts=2)
    down = packed_experts(4, 128, 64, device, **options, parts=1)
    chosen = torch.tensor([[2, 0]] * 20, dtype=torch.int32, device=device)
    choice = Choice(chosen, torch.full((20, 2), 0.5, device=device))
    x = random(20, 128, device=device, dtype=dtype, seed=3)
    exact = listed(gate_up, down, torch.float64)(x.double(), choice)
    plain = listed(gate_up, down, dtype)(x, choice)
    for weight in (gate_up, down):
        weight.factors[[1, 3]] = torch.nan
    assert_as_good_as_torch(StackedExperts(gate_up, down, "silu")(x, choice), plain, exact)


@pytest.mark.compiled
def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    weight = packed_experts(1, 64, 64, "cpu", bits=4, group=32, parts=1, ordered=False)
    tilings = [packed_grouped_tiling(weight, rows, is_gated=True) for rows in (0.1, 6, 7, 24, 25, 10_000)]
    assert [tiling.rows for tiling in tilings] == [16, 16, 32, 32, 64, 64]
