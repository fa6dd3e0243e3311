"""The GEMV of experts in floats on a CPU: when it runs, its tilings, the kernel as compiled."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from chosen_products import expert_product_name, take_for_hopper
from compiled_figures import compiled_figures
from torch import Tensor
from torch.torch_version import TorchVersion

from octavo.errors import InvalidArgumentError
from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.floats import expert_gemv_tiling as tiling
from octavo.gemm.hopper.floats.dense_gemv_tiling import WARPS, X_STEP
from octavo.gemm.hopper.floats.expert_gemv_tiling import (
    LEAST_STAGES,
    MAX_TOKENS,
    REGISTERS,
    float_tiling_for,
    unsupported_reason,
)
from octavo.gemm.stacked_experts import StackedExperts

pytestmark = pytest.mark.compiled
# Of an SM, less what the system takes of it for each program.
SHARED_BYTES, SYSTEM_BYTES = 228 * 1024, 1024
# Bytes, and instructions that move what has no register. Triton 3.7 elects a thread for each arrival at a
# barrier, and ptxas then keeps more of what it loads ahead, in two of the kernels.
IS_NEW = TorchVersion(version("triton")) >= "3.7"
STACK_BYTES, SPILLS = (256, 144) if IS_NEW else (8, 2)
ROWS = torch.zeros(5, 512, dtype=torch.bfloat16)


def weight(
    rows: int = 64, size: int = 512, width: int = 0, dtype: torch.dtype = torch.bfloat16
) -> ExpertWeight:
    values = torch.zeros(4, rows, size, dtype=torch.float8_e4m3fn if width else dtype)
    return ExpertWeight(values, torch.ones(4, size // width, rows) if width else None, width)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, tiling)


def test_gate_up_and_down_fit_an_sm_but_never_two_gate_ups() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_float_gemv.py"))
    assert len(figures) == 8
    for name, facts in figures.items():
        assert facts["stack"] <= STACK_BYTES, name
        assert facts["spills"] <= SPILLS, name
        assert facts["stages"] >= LEAST_STAGES, name
    shared = {name: facts["shared"] + SYSTEM_BYTES for name, facts in figures.items()}
    gate_ups = [size for name, size in shared.items() if name.startswith("gate")]
    downs = [size for name, size in shared.items() if name.startswith("down")]
    assert 2 * min(gate_ups) > SHARED_BYTES
    assert max(gate_ups) + max(downs) <= SHARED_BYTES
    # The warps that multiply, and the one that fetches, which takes the registers of four.
    assert 2 * (WARPS + 4) * 32 * REGISTERS <= 65536


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("num_tokens", range(1, MAX_TOKENS + 1))
@pytest.mark.parametrize(("size", "summed"), [(2048, 1), (768, 8), (1024, 8), (14336, 2), (256, 6)])
def test_rows_of_x_have_room_for_whole_steps(size: int, summed: int, num_tokens: int, itemsize: int) -> None:
    chosen = float_tiling_for(size, itemsize, num_tokens, summed)
    columns = chosen.blocks * WARPS * 64 // itemsize
    last = (summed - 1) * size
    assert chosen.x_steps * X_STEP >= last + -(-size // columns) * columns
    assert chosen.x_steps * X_STEP < last + size + columns + X_STEP


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    for good in (weight(), weight(width=512), weight(width=128), weight(rows=72)):
        assert unsupported_reason(ROWS[:1], good, 1) is None
        assert unsupported_reason(ROWS[:4], good, 4) is None
    assert unsupported_reason(ROWS[:1].half(), weight(dtype=torch.float16), 1) is None
    for x, bad in (
        (ROWS[:1].half(), weight()),
        (ROWS[:1].float(), weight(dtype=torch.float32)),
        (ROWS[:1], weight(rows=24)),
        (ROWS[:1], weight(size=480)),
        (ROWS[:1], weight(size=384, width=384)),
        (ROWS[:, ::2][:1], weight(size=256)),
        # More scales than a warp has registers for.
        (ROWS[:1], weight(rows=32, size=8192, width=128)),
    ):
        assert "it needs contiguous rows in half precision" in str(unsupported_reason(x, bad, 1))
    assert "1 to 4 tokens, got 5" in str(unsupported_reason(ROWS, weight(), 1))
    assert "1 to 4 tokens, got 0" in str(unsupported_reason(ROWS[:0], weight(), 1))
    assert "leave room for weights" in str(unsupported_reason(ROWS[:4], weight(size=4096), 8))
    biased = ExpertWeight(weight().values, bias=torch.zeros(4, 64))
    assert "without biases" in str(unsupported_reason(ROWS[:1], biased, 1))


def test_who_multiplies_a_few_tokens(on_hopper: None) -> None:
    def product(x: Tensor, *weights: ExpertWeight, chosen: int = 4, deterministic: bool = False) -> str:
        return expert_product_name(x, weights, chosen, rows_per_expert=0.1, deterministic=deterministic)

    pair = weight(), weight()
    assert [product(ROWS[:number], *pair) for number in (1, 2, 4, 5)] == [
        "gemv",
        "few",
        "few",
        "grouped",
    ]
    float8 = weight(width=512), weight(width=512)
    assert [product(ROWS[:number], *float8) for number in (1, 4, 5)] == [
        "gemv",
        "gemv",
        "rounded",
    ]
    assert product(ROWS[:1], weight(), weight(rows=24)) == "few"
    # Four rows of each token's eight experts leave no room.
    assert product(ROWS[:4], weight(width=512), weight(size=4096, width=4096), chosen=8) == "few"
    assert product(ROWS[:1], *pair, deterministic=True) == "grouped"


def test_other_devices_do_without_it() -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(ROWS[:1], weight(), 4))
    choice = Choice(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4))
    with pytest.raises(InvalidArgumentError, match="the GEMV of experts cannot run: it needs a Hopper"):
        StackedExperts(weight(), weight(), "silu").gemv(ROWS[:1], choice)
