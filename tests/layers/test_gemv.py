"""The GEMV for Hopper GPUs on a CPU: when it can run and is chosen, tilings, and the kernel as compiled."""

from functools import partial
from pathlib import Path

import pytest
import torch
import triton_layer_cases  # noqa: F401  (skips where there is no Triton)
from chosen_products import product_name, take_for_hopper
from compiled_figures import compiled_figures

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.hopper.floats import dense_gemv_tiling as gemv_tiling
from octavo.gemm.hopper.floats.dense_gemv_tiling import (
    ATOM_BYTES,
    TILE_ROWS,
    WARPS,
    X_STEP,
    gemv_tiling_for,
    unsupported_reason,
)
from octavo.gemm.make_linear import make_linear
from octavo.gemm.portable import skinny_tiling

HALF = torch.bfloat16
choose_gemm = choose_path = partial(product_name, hopper=["gemv"])
# Of two programs, but for the system's.
SHARED_BYTES = 226 * 1024
REGISTERS = 65536


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, gemv_tiling)


def float8(num_rows: int, size: int, height: int, width: int) -> Float8Weight:
    scales = torch.ones(-(-num_rows // height), -(-size // width))
    return Float8Weight(torch.zeros(num_rows, size, dtype=FLOAT8), scales, height, width)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("size", [64, 1024, 2560, 3072, 4096, 12288, 16384, 25600, 26624])
def test_two_programs_fit_an_sm(size: int, itemsize: int) -> None:
    tiling = gemv_tiling_for(size, itemsize)
    assert tiling.blocks in (4, 8)
    assert tiling.stages >= 2
    step = tiling.blocks * WARPS * ATOM_BYTES
    steps = -(-size * itemsize // step)
    row = 2 * -(-steps * step // itemsize // X_STEP) * X_STEP
    sums = 4 * WARPS * TILE_ROWS
    assert 2 * (row + tiling.stages * step * TILE_ROWS + sums + 16 * tiling.stages) <= SHARED_BYTES
    if size <= 16384:
        # A program has its four warps and, for the one that fetches, four more.
        assert 2 * 8 * 32 * tiling.registers <= REGISTERS


def test_the_kernel_spills_nothing_takes_half_an_sm_and_copies_at_a_pace() -> None:
    """Before it asks for more than 48 KiB, or two steps, the warp that copies waits for earlier ones."""
    figures = compiled_figures(Path(__file__).with_name("compile_gemv.py"))
    assert len(figures) == 7
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert 2 * facts["shared"] <= SHARED_BYTES, name
        most = max(2, 48 * 1024 // facts["step_bytes"])
        # For a free stage, for what the stage holds, and for the step that is still being copied.
        assert facts["waits"] == (3 if facts["stages"] > most else 2), name
    assert {facts["waits"] for facts in figures.values()} == {2, 3}


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    weight = torch.zeros(64, 128, dtype=HALF)
    assert unsupported_reason(weight) is None
    assert unsupported_reason(weight.half()) is None
    assert unsupported_reason(float8(64, 256, 1, 256)) is None
    assert unsupported_reason(float8(64, 256, 128, 128)) is None
    for bad in (
        weight.float(),
        weight[:31],
        weight[:, :64],
        torch.zeros(64, 48, dtype=HALF),
        torch.zeros(64, 26656, dtype=HALF),
        torch.zeros(64 * 128 + 4, dtype=HALF)[4:].view(64, 128),
        float8(64, 96, 1, 96),
        float8(64, 256, 32, 32),
    ):
        assert "it needs contiguous weights" in str(unsupported_reason(bad))


def test_a_single_row_is_its_work(on_hopper: None) -> None:
    weight = torch.zeros(64, 128, dtype=HALF)
    assert choose_gemm(torch.zeros(1, 128, dtype=HALF), weight) == "gemv"
    assert choose_gemm(torch.zeros(2, 128, dtype=HALF), weight) == "skinny"
    for num_columns, size in ((65535, 64), (64, 16384)):
        long = torch.empty(num_columns, size, dtype=HALF)
        assert choose_gemm(torch.zeros(1, size, dtype=HALF), long) == "gemv"
    for num_columns, size in ((65536, 64), (64, 16448)):
        long = torch.empty(num_columns, size, dtype=HALF)
        assert choose_gemm(torch.zeros(1, size, dtype=HALF), long) == "skinny"
    assert choose_gemm(torch.zeros(1, 128), weight.float()) == "skinny"
    assert [choose_path(rows, float8(64, 256, 1, 256)) for rows in (0, 1, 2)] == ["float8", "gemv", "float8"]
    assert choose_path(1, float8(64, 96, 1, 96)) == "skinny"


def test_layers_whose_row_it_multiplies(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(64, 128, dtype=HALF)
    assert not make_linear(weight).has_gemv, "fused kernels need a GPU"
    monkeypatch.setattr(skinny_tiling, "unsupported_reason", lambda weight: None)
    assert make_linear(weight).has_gemv
    assert not make_linear(torch.zeros(64, 16448, dtype=HALF)).has_gemv
    assert GpuLinear(float8(64, 4096, 1, 4096)).has_gemv
    assert not GpuLinear(float8(64, 96, 1, 96)).has_gemv
    assert not make_linear(torch.zeros(64, 128)).has_gemv


def test_other_devices_do_without_it() -> None:
    assert not GpuLinear(float8(64, 256, 1, 256)).has_gemv
    weight = torch.zeros(64, 128, dtype=HALF)
    assert "needs a Hopper GPU" in str(unsupported_reason(weight))
    assert choose_path(1, float8(64, 256, 1, 256)) == "skinny"


def test_arguments_that_do_not_fit(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.gemm.hopper.floats import float_gemv as gemv

    row, weight = torch.zeros(1, 128, dtype=HALF), torch.zeros(64, 128, dtype=HALF)
    options = {"norm_weight": torch.zeros(64), "activation": "tanh", "residual": row}
    for name, value in options.items():
        with pytest.raises(InvalidArgumentError, match=name):
            gemv.gemv_linear(row, weight, **{name: value})  # type: ignore[arg-type]
    for bad in (row.expand(2, -1), row[:, :64], row.half()):
        with pytest.raises(InvalidArgumentError):
            gemv.gemv_linear(bad, weight)
    with pytest.raises(InvalidArgumentError, match="bias"):
        gemv.gemv_linear(row, weight, torch.zeros(63, dtype=HALF))
    with pytest.raises(InvalidArgumentError, match="gemv_linear cannot run: it needs contiguous"):
        gemv.gemv_linear(row, weight[:31])
