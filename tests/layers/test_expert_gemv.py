"""The GEMV of MXFP4 experts on a CPU: when it runs, tilings, the kernel as compiled, its numbers."""

from pathlib import Path

import pytest
import torch
from chosen_products import expert_product_name, take_for_hopper
from compiled_figures import compiled_figures
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, num_spans, pack_words
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.mxfp4 import mxfp4_gemv_tiling as tiling
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import (
    COLUMNS,
    REGISTERS,
    WARPS,
    mxfp4_gemv_tiling_for,
    unsupported_reason,
)
from octavo.gemm.stacked_experts import StackedExperts

pytestmark = pytest.mark.compiled
# Of an SM, less what the system takes of it for each program.
SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
ROW = torch.zeros(1, 256, dtype=torch.bfloat16)


def weight(rows: int = 64, columns: int = 256, number: int = 4) -> Mxfp4ExpertWeight:
    sizes = number, num_spans(columns), rows
    words = torch.zeros(*sizes, 16, dtype=torch.int32)
    return Mxfp4ExpertWeight(columns, words, torch.zeros(sizes, dtype=torch.int32))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, tiling)


def test_of_gpt_oss_gate_up_and_down_fit_an_sm_but_never_two_gate_ups() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_expert_gemv.py"))
    assert len(figures) == 4
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert facts["stages"] >= 4, name
    gate_up, down = (figures[name]["shared"] + SYSTEM_BYTES for name in ("gate and up", "down"))
    assert 2 * gate_up > SHARED_BYTES
    assert gate_up + down <= SHARED_BYTES
    # The warps that multiply, and four that fetch.
    assert 2 * (WARPS + 4) * 32 * REGISTERS <= 65536


@pytest.mark.parametrize("size", [96, 2880, 4096])
@pytest.mark.parametrize("num_chosen", [2, 4, 6, 8])
def test_parts_are_whole_units(size: int, num_chosen: int) -> None:
    gate_up, down = (mxfp4_gemv_tiling_for(size, num_chosen, is_gated=is_gated) for is_gated in (True, False))
    assert (gate_up.parts, gate_up.units) == (1, 2)
    assert down.parts == num_chosen // 2
    assert down.parts % down.units == 0
    # Each expert of a step has a warp that fetches, and there are four.
    assert down.units <= 2


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    assert unsupported_reason(ROW, weight(), 4) is None
    # The last columns of a tile, and the middle of a span.
    assert unsupported_reason(ROW, weight(rows=72, columns=96), 2) is None
    for bad in ((ROW.half(), weight(), 4), (ROW, weight(), 3), (ROW, weight(rows=68), 4)):
        assert "it needs rows in bfloat16, an even number of experts" in str(unsupported_reason(*bad))
    # Eight rows of so many columns leave no room for weights.
    assert "got torch.bfloat16, 8 experts" in str(unsupported_reason(ROW, weight(8, 8192, 1), 8))


def test_who_multiplies_a_single_token(on_hopper: None) -> None:
    weights = (weight(), weight())

    def product(x: Tensor, *weights: Mxfp4ExpertWeight, chosen: int = 4, deterministic: bool = False) -> str:
        return expert_product_name(x, weights, chosen, rows_per_expert=0.1, deterministic=deterministic)

    assert product(ROW, *weights) == "gemv"
    assert product(ROW.expand(2, -1), *weights) == "few"
    assert product(ROW, *weights, chosen=3) == "few"
    assert product(ROW, weight(), weight(rows=68)) == "few"
    assert product(ROW, *weights, deterministic=True) == "grouped"


def test_other_devices_do_without_it() -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(ROW, weight(), 4))
    choice = Choice(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4))
    with pytest.raises(InvalidArgumentError, match="the GEMV of experts cannot run: it needs a Hopper"):
        StackedExperts(weight(), weight(), "silu").gemv(ROW, choice)


def bfloat16_of(words: Tensor, block: int) -> Tensor:
    """Numbers of a block of words [...], two of each [..., 2]: what stage._NUMBERS makes."""
    words = words.long() & 0xFFFFFFFF
    turned = {shift: (words >> shift | words << 32 - shift) & 0xFFFFFFFF for shift in (2, 6)}
    bits = (
        words & 0x81C081C0,
        turned[6] & 0x81C081C0,
        words << 4 & 0x81C081C0,
        turned[2] & 0x81808180 | words << 6 & 0x00400040,
    )[block]
    halves = torch.stack((bits & 0xFFFF, bits >> 16), -1)
    return (halves - 0x10000 * (halves >> 15)).to(torch.int16).view(torch.bfloat16)


def test_numbers_of_words_are_2_to_the_126_too_small() -> None:
    """And times 2 ** 64, as rows of x are, ordinary floats."""
    codes = torch.randint(256, (COLUMNS, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = pack_words(codes)[0]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    numbers = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).view(COLUMNS, 4, 32)
    for block in range(4):
        got = bfloat16_of(words, block).flatten(-2).double()
        assert torch.equal(got * 2.0**126, numbers[:, block].double())
    assert torch.finfo(torch.float32).tiny < 0.5 * 2.0**-126 * 2.0**64
