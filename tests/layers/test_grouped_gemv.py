"""The GEMV of packed weights on a CPU: when it runs, tilings, the kernel as compiled, its arithmetic."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chosen_products import take_for_hopper
from compiled_figures import compiled_figures
from grouped_cases import packed, random_blocks
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PackedWeight
from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.hopper.packed import packed_gemv_tiling as gemv_tiling
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP, SPAN, WARPS, tiling_for, unsupported_reason
from octavo.gemm.make_linear import make_quantised_linear
from octavo.gemm.product import find

pytestmark = pytest.mark.compiled
# Of two programs, but for the system's.
SHARED_BYTES = 226 * 1024
REGISTERS = 65536


def weight(rows: int = 64, columns: int = 256, group: int = GROUP, bits: int = 4) -> PackedWeight:
    return packed(random_blocks(rows, columns, group=group, bits=bits), "cpu")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, gemv_tiling)


@pytest.mark.parametrize("size", [64, 1024, 4096, 4224, 8192, 12288, 16384])
def test_two_programs_fit_an_sm(size: int) -> None:
    tiling = tiling_for(size)
    assert tiling.stages >= 2
    step = tiling.blocks * WARPS * 16 * (SPAN // 2 + 2 * 4)
    row = -(-size // 4096) * 4096 * 4
    assert 2 * (row + tiling.stages * step) <= SHARED_BYTES
    # The warps that multiply, and four for the one that fetches.
    assert 2 * (WARPS + 4) * 32 * tiling.registers <= REGISTERS


def test_the_kernel_spills_nothing_and_takes_half_an_sm() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_grouped_gemv.py"))
    assert len(figures) == 5
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert 2 * facts["shared"] <= SHARED_BYTES, name
        assert facts["byte_products"] == 8, name


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    for columns in (128, 384, 16384):
        assert unsupported_reason(weight(columns=columns)) is None
    for bad in (
        weight(rows=24),
        weight(rows=68),
        weight(columns=16512),
        weight(group=64),
        weight(group=256),
        weight(group=32, bits=8),
    ):
        assert "it needs a weight [N, K] of 4 bits in groups of 128" in str(unsupported_reason(bad))


def test_who_multiplies_a_single_row(on_hopper: None) -> None:
    """Weights that the GEMV cannot read, and more rows, are few_linear's."""
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    def choose(num_rows: int, weight: PackedWeight) -> Callable[..., Tensor]:
        x = torch.zeros(num_rows, weight.size, dtype=torch.bfloat16)
        layer = GpuLinear(weight)
        return find(layer.products, x, weight).run

    assert choose(1, weight()) is packed_gemv_linear
    assert choose(2, weight()) is few_linear
    assert choose(1, weight(group=64)) is few_linear
    for group in (GROUP, 64):
        layer = GpuLinear(weight(group=group))
        assert layer.has_gemv


def test_other_devices_do_without_it() -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(weight()))
    assert not GpuLinear(weight()).has_gemv
    blocks = random_blocks(64, 256, group=GROUP)
    assert not make_quantised_linear([blocks], dtype=torch.float32).has_gemv


def test_arguments_that_do_not_fit(on_hopper: None) -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    row = torch.zeros(1, 256, dtype=torch.bfloat16)
    options = {"norm_weight": torch.zeros(64), "activation": "tanh", "residual": row, "bias": row[0]}
    for name, value in options.items():
        with pytest.raises(InvalidArgumentError, match=name):
            packed_gemv_linear(row, weight(), **{name: value})  # type: ignore[arg-type]
    for bad in (row.expand(2, -1), row[:, :128], row.float()):
        with pytest.raises(InvalidArgumentError, match="x must be"):
            packed_gemv_linear(bad, weight())
    with pytest.raises(InvalidArgumentError, match="cannot run: it needs a weight"):
        packed_gemv_linear(row, weight(group=64))


def digits_of(integers: Tensor) -> Tensor:
    """Signed digits of base 256, the lowest first: what _TO_DIGITS makes of each integer's bytes."""
    signed = (integers + 0x00808080) ^ 0x00808080
    return torch.stack([(signed >> 8 * digit).to(torch.int8) for digit in range(4)])


def test_digits_are_the_integer() -> None:
    torch.manual_seed(0)
    limit = 2**30
    edges = torch.tensor([0, 1, -1, 127, 128, -128, -129, 32767, 32768, -32769, limit - 1, 1 - limit])
    integers = torch.cat((edges, torch.randint(1 - limit, limit, (10000,)))).to(torch.int32)
    powers = 256 ** torch.arange(4)
    assert torch.equal((digits_of(integers).long() * powers[:, None]).sum(0), integers.long())


def test_bytes_of_words_meet_the_digits_of_their_columns() -> None:
    """Both masks, and the columns that digits are written for, are the weight's own numbers."""
    torch.manual_seed(0)
    x = torch.randint(1 - 2**30, 2**30, (2, SPAN), dtype=torch.int32)
    packed_weight = weight(rows=32, columns=2 * SPAN)
    words = packed_weight.words.view(32, 2, 32, 1)
    shifts = torch.arange(4) * 8
    low = (words & 0x0F0F0F0F) >> shifts & 0xFF
    high = (words >> 4 & 0x0F0F0F0F) >> shifts & 0xFF
    digits = digits_of(x).view(4, 2, 4, 2, 32).long()  # digit, span, byte, odd planes, word
    powers = 256 ** torch.arange(4)
    sums = torch.zeros(32, 2, 2, dtype=torch.long)
    for half, planes in enumerate((low, high)):
        products = torch.einsum("rsjp,dspj->drsp", planes.long(), digits[:, :, :, half])
        sums += (products * powers[:, None, None, None]).sum(0).view(32, 2, 2, 2).sum(-1)
    scales = packed_weight.pairs.T.contiguous().view(torch.float16).view(32, 2, 2, 2).double()
    totals = x.double().view(2, 2, GROUP).sum(-1)
    got = ((sums * scales[..., 0] + totals * scales[..., 1]) * packed_weight.factor).sum((1, 2))
    expected = packed_weight.dequantise().double() @ x.view(-1).double()
    torch.testing.assert_close(got, expected)
