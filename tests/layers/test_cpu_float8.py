"""Float8 weights on a CPU: the specification's products, for tiles of any size and any batch."""

import math

import pytest
import torch
from cpu_kinds import for_kinds_of_cpus  # noqa: F401
from torch import Tensor

from octavo.forms.float8 import FLOAT8, Float8Weight, quantise
from octavo.gemm.cpu.compiled_rows import rows_in_bfloat16
from octavo.gemm.cpu.float8_rows import Float8CpuLinear
from octavo.gemm.cpu.library import compile_failure
from octavo.gemm.dequantised import DequantisedLinear
from octavo.gemm.make_linear import describe_layers, make_quantised_linear

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")
CPU = torch.device("cpu")
# Rows, columns, and a tile's; the last tiles are smaller, rows end within a vector.
SHAPES = [(40, 64, 1, 64), (33, 300, 128, 128), (200, 512, 128, 128), (4, 32, 1, 32), (70, 1000, 70, 1000)]


def make_weight(rows: int, columns: int, height: int, width: int) -> Float8Weight:
    """Random numbers, the largest and the least ones among them."""
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(rows, columns, generator=generator)).to(FLOAT8)
    values.view(-1)[:6] = torch.tensor([448.0, -448.0, 2**-9, -(2**-9), 0.0, -0.0]).to(FLOAT8)
    scales = 0.1 + torch.rand(-(-rows // height), -(-columns // width), generator=generator)
    return Float8Weight(values, scales, height, width)


def assert_exact(got: Tensor, x: Tensor, weight: Float8Weight, bias: Tensor | None = None) -> None:
    values = weight.dequantise().double()
    expected = x.double() @ values.T + (0 if bias is None else bias)
    size = x.double().abs() @ values.abs().T + 1
    assert ((got - expected).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 6, 13, 300])
def test_products(shape: tuple[int, int, int, int], num_rows: int) -> None:
    weight, x, bias = make_weight(*shape), torch.randn(num_rows, shape[1]), torch.randn(shape[0])
    assert_exact(Float8CpuLinear(weight)(x), x, weight)
    assert_exact(Float8CpuLinear(weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows_in_bfloat16(shape: tuple[int, int, int, int]) -> None:
    weight, x, bias = make_weight(*shape), torch.randn(40, shape[1]), torch.randn(shape[0])
    layer = Float8CpuLinear(weight, bias, rounds=True)
    assert_exact(layer(x[:16]), x[:16], weight, bias)
    expected = torch.nn.functional.linear(x.bfloat16(), weight.dequantise().bfloat16()).float() + bias
    size = x.double().abs() @ weight.dequantise().double().abs().T + 1
    assert ((layer(x) - expected).abs() <= 1e-3 * size).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_in_bfloat16_are_rounded_once(shape: tuple[int, int, int, int]) -> None:
    weight = make_weight(*shape)
    whole = weight.dequantise().bfloat16()
    for start, stop in ((0, shape[0]), (1, 4)):
        assert torch.equal(rows_in_bfloat16(weight, start, stop), whole[start:stop])


def test_every_number_is_the_one_that_pytorch_has() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = Float8Weight(codes.view(FLOAT8)[:, None].repeat(1, 32), torch.ones(254, 1), 1, 32)
    x = torch.zeros(1, 32)
    x[0, 7] = 1
    assert torch.equal(Float8CpuLinear(weight)(x)[0], codes.view(FLOAT8).float())


def test_no_bit_of_a_row_depends_on_the_others_or_on_threads() -> None:
    layer, x, num_threads = (
        Float8CpuLinear(make_weight(*SHAPES[1])),
        torch.randn(20, 300),
        torch.get_num_threads(),
    )
    whole = layer(x)
    for first, last in ((0, 1), (3, 10), (13, 20)):
        assert torch.equal(layer(x[first:last]), whole[first:last])
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(num_threads)


def test_what_is_no_number() -> None:
    """In x it stays in its row; a weight that has some is dequantised as PyTorch does."""
    weight, x = make_weight(*SHAPES[0]), torch.randn(3, 64)
    clean = Float8CpuLinear(weight)(x)
    x[1, 5] = math.inf
    out = Float8CpuLinear(weight)(x)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    weight.values.view(torch.uint8)[3, 4] = 0xFF
    out = Float8CpuLinear(weight)(torch.randn(2, 64))
    assert out[:, 3].isnan().all()
    assert out[:, :3].isfinite().all()


def test_who_multiplies_float8_on_a_cpu() -> None:
    weight = quantise(torch.randn(64, 96))
    assert isinstance(make_quantised_linear([weight], dtype=torch.float32), Float8CpuLinear)
    assert isinstance(make_quantised_linear([weight], dtype=torch.bfloat16), DequantisedLinear)
    # Where floats are bfloat16, many rows are rounded, too.
    x = torch.randn(17, 96)
    layers = [
        make_quantised_linear([weight], dtype=torch.float32, matrix_dtype=each)
        for each in (None, torch.float32, torch.bfloat16)
    ]
    assert [torch.equal(layer(x), layers[0](x)) for layer in layers] == [True, True, False]
    assert "up to 16 rows by the C kernel" in describe_layers("float8", CPU, torch.float32)
    # Weights of two forms above one another, and too few outputs for the kernel.
    rows = make_quantised_linear([weight, quantise(torch.randn(3, 96))], dtype=torch.float32)
    assert rows(torch.randn(2, 96)).shape == (2, 67)
    few, x = quantise(torch.randn(3, 96)), torch.randn(2, 96)
    assert_exact(make_quantised_linear([few], dtype=torch.float32)(x), x, few)
