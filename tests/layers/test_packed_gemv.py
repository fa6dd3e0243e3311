"""The GEMV of a single token's packed experts on a CPU: when it runs, its tilings, the kernel as compiled."""

from pathlib import Path

import pytest
import torch
from chosen_products import expert_product_name, take_for_hopper
from compiled_figures import compiled_figures
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.packed import packed_expert_tiling as tiling
from octavo.gemm.hopper.packed.packed_expert_tiling import (
    LEAST_STAGES,
    REGISTERS,
    tiling_for,
    unsupported_reason,
)
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS
from octavo.gemm.stacked_experts import StackedExperts

pytestmark = pytest.mark.compiled
# Of an SM, less what the system takes of it for each program.
SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
ROWS = torch.zeros(3, 512, dtype=torch.bfloat16)


def weight(
    rows: int = 64, size: int = 512, *, bits: int = 4, group: int = 128, ordered: bool = False
) -> PackedExpertWeight:
    spans = -(-size // (1024 // bits))
    words = torch.zeros(4, rows, spans * 32, dtype=torch.int32)
    pairs = torch.zeros(4, spans * (1024 // bits) // group, rows, dtype=torch.int32)
    order = torch.arange(size, dtype=torch.int32).repeat(4, 1) if ordered else None
    return PackedExpertWeight(bits, size, group, words, pairs, torch.ones(4, 1), order)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, tiling)


def test_gate_up_and_down_fit_an_sm_but_never_two_gate_ups() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_packed_gemv.py"))
    assert len(figures) == 6
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert facts["stages"] >= LEAST_STAGES, name
        # Four digits of a span's 256 columns by mma's 32: low and high halves of two atoms.
        assert facts["products"] == 8, name
    shared = {name: facts["shared"] + SYSTEM_BYTES for name, facts in figures.items()}
    gate_ups = [size for name, size in shared.items() if name.startswith("gate")]
    assert 2 * min(gate_ups) > SHARED_BYTES
    assert shared["gate and up"] + shared["down"] <= SHARED_BYTES
    # The warps that multiply, and the one that fetches, which takes the registers of four.
    assert 2 * (WARPS + 4) * 32 * REGISTERS <= 65536


@pytest.mark.parametrize(
    ("size", "summed", "box"),
    [(2048, 1, 8), (768, 8, 4), (128, 1, 4), (1408, 6, 8), (2944, 1, 8), (16384, 1, 8), (1024, 16, 4)],
)
def test_experts_take_whole_boxes_of_the_row(size: int, summed: int, box: int) -> None:
    chosen = tiling_for(size, summed)
    assert chosen.box == box
    assert WARPS % box == 0
    assert size <= chosen.padded < size + box * SPAN
    assert chosen.padded % (box * SPAN) == 0
    assert 0 <= chosen.columns - summed * chosen.padded < SPANS_AT_ONCE * SPAN


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    for good in (weight(), weight(rows=TILE_ROWS), weight(size=256)):
        assert unsupported_reason(ROWS[:1], good, 1) is None
        assert unsupported_reason(ROWS[:1].half(), good, 8) is None
    for x, bad, summed in (
        (ROWS, weight(), 1),
        (ROWS[:0], weight(), 1),
        (ROWS[:1].float(), weight(), 1),
        (ROWS[:1, ::2], weight(size=256), 1),
        (ROWS[:1], weight(rows=40), 1),
        (ROWS[:1], weight(bits=8), 1),
        (ROWS[:1], weight(group=64), 1),
        (ROWS[:1], weight(ordered=True), 1),
        (ROWS[:1], weight(size=14336), 2),
    ):
        reason = str(unsupported_reason(x, bad, summed))
        assert "it needs a contiguous row in half precision and experts of 4 bits in groups of 128" in reason


def test_who_multiplies_a_single_token(on_hopper: None) -> None:
    def product(x: Tensor, *weights: PackedExpertWeight, deterministic: bool = False) -> str:
        return expert_product_name(x, weights, 2, rows_per_expert=0.1, deterministic=deterministic)

    pair = weight(), weight()
    assert [product(ROWS[:number], *pair) for number in (1, 2, 3)] == ["gemv", "few", "grouped"]
    assert product(ROWS[:1], *pair, deterministic=True) == "grouped"
    # Mixtral's experts: two rows between both products are too long.
    assert product(ROWS[:1], weight(), weight(size=14336)) == "few"


def test_other_devices_do_without_it() -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(ROWS[:1], weight(), 1))
    choice = Choice(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2))
    with pytest.raises(InvalidArgumentError, match="the GEMV of packed experts cannot run: it needs a Hop"):
        StackedExperts(weight(), weight(), "silu").gemv(ROWS[:1], choice)
