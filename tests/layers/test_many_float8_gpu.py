"""The GEMM of many float8 rows on a GPU, against float64: every tiling, number of rows and epilogue."""

import pytest
import torch
from torch import Tensor
from triton_layer_cases import plain_linear, with_nan_behind

from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.hopper.float8.many_tiling import ManyTiling, fill_tiling
from octavo.kernels.device import nvidia_generation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or nvidia_generation(torch.device("cuda")) != 9,
        reason="needs a Hopper GPU",
    ),
]
GATED = [fill_tiling(*parts, 2) for parts in ((64, 32), (64, 0), (32, 0))]
PLAIN = [fill_tiling(*parts, 1) for parts in ((128, 64), (128, 0), (64, 0), (32, 0))]
# bfloat16 results are rounded by 2^-9; tensor cores lose bits of the products of a span.
ERROR = 0.003


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def operands(num_rows: int, num_weight_rows: int, size: int) -> tuple[Tensor, Tensor, Float8Weight]:
    """Rows with NaN behind the last one, their scales, and a weight."""
    x = with_nan_behind(random(num_rows, size).to(FLOAT8))
    values = random(num_weight_rows, size, seed=1).to(FLOAT8)
    scales = random(num_weight_rows, 1, seed=2).abs() / 10
    return x, random(num_rows, seed=3).abs() / 10, Float8Weight(values, scales, 1, size)


def multiply(
    x: Tensor, row_scales: Tensor, weight: Float8Weight, *, dtype: torch.dtype = torch.bfloat16, **options
) -> Tensor:
    from octavo.gemm.hopper.float8.persistent_gemm import many_linear

    return many_linear(x, weight, row_scales=row_scales, dtype=dtype, **options)


def exact_product(x: Tensor, row_scales: Tensor, weight: Float8Weight, **options) -> Tensor:
    return plain_linear(x.double() * row_scales.double()[:, None], weight.dequantise(), **options)


def assert_close(got: Tensor, exact: Tensor) -> None:
    assert ((got.double() - exact).norm(dim=-1) <= ERROR * exact.norm(dim=-1)).all()


@pytest.mark.parametrize("tiling", PLAIN, ids=lambda tiling: f"{tiling.columns}+{tiling.extra}")
@pytest.mark.parametrize("num_rows", [1, 65, 128, 300])
def test_products(tiling: ManyTiling, num_rows: int) -> None:
    """K of five and a half steps; the last tile of columns is not whole."""
    x, row_scales, weight = operands(num_rows, 1040, 704)
    bias = random(1040, seed=4).bfloat16()
    exact = exact_product(x, row_scales, weight)
    assert_close(multiply(x, row_scales, weight, tiling=tiling), exact)
    exact = exact_product(x, row_scales, weight, bias=bias)
    assert_close(multiply(x, row_scales, weight, bias=bias, tiling=tiling), exact)
    residual = random(num_rows, 1040, seed=5).bfloat16()
    exact = exact_product(x, row_scales, weight, bias=bias, residual=residual)
    assert multiply(x, row_scales, weight, bias=bias, residual=residual, tiling=tiling) is residual
    assert_close(residual, exact)


@pytest.mark.parametrize("num_rows", [1, 65, 300])
@pytest.mark.parametrize(
    ("columns", "activation"), [(128, None), (64, None), (32, None), (64, "silu"), (32, "silu")]
)
@pytest.mark.parametrize("num_tiles", [5, 1])
def test_tiles_with_a_scale(num_rows: int, columns: int, activation: str | None, num_tiles: int) -> None:
    """Scales of tiles differ by a factor of up to 10; K of some tiles, or a single one."""
    x, row_scales, weight = operands(num_rows, 1280, 128 * num_tiles)
    scales = torch.rand(10, num_tiles, device="cuda") * 0.09 + 0.01
    weight = Float8Weight(weight.values, scales, 128, 128)
    residual = random(num_rows, 1280, seed=5).bfloat16() if activation is None else None
    options = {"activation": activation, "residual": residual}
    exact = exact_product(x, row_scales, weight, **options)
    tiling = fill_tiling(columns, 0, 1 if activation is None else 2, span=1)
    assert_close(multiply(x, row_scales, weight, tiling=tiling, **options), exact)


@pytest.mark.parametrize("tiling", GATED, ids=lambda tiling: f"{tiling.columns}+{tiling.extra}")
@pytest.mark.parametrize("num_rows", [1, 65, 300])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up(tiling: ManyTiling, num_rows: int, activation: str) -> None:
    x, row_scales, weight = operands(num_rows, 1072, 704)
    bias = random(1072, seed=4).bfloat16()
    options = {"bias": bias, "activation": activation}
    exact = exact_product(x, row_scales, weight, **options)
    assert_close(multiply(x, row_scales, weight, tiling=tiling, **options), exact)


@pytest.mark.parametrize("shape", [(24576, 4096, "silu"), (6144, 4096, None), (4096, 12288, None)], ids=str)
def test_prompts_of_a_decoder(shape: tuple[int, int, str | None]) -> None:
    """Several tiles for each program, in groups; results beside one another in strided rows."""
    num_weight_rows, size, activation = shape
    x, row_scales, weight = operands(2100, num_weight_rows, size)
    wide = torch.zeros(2100, 2 * num_weight_rows, device="cuda").bfloat16()
    options = {"activation": activation, "residual": wide[:, 64:4160] if size > 4096 else None}
    exact = exact_product(x, row_scales, weight, **options)
    assert_close(multiply(x, row_scales, weight, **options), exact)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_results_in_float16(activation: str | None) -> None:
    x, row_scales, weight = operands(200, 1024, 512)
    # No result may be too small for float16.
    row_scales += 0.5
    got = multiply(x, row_scales, weight, dtype=torch.float16, activation=activation)
    assert got.dtype == torch.float16
    assert_close(got, exact_product(x, row_scales, weight, activation=activation))


def test_extreme_gates() -> None:
    """Gates of any size, of both signs: no overflow on the way, and NaN only where silu has it."""
    gates = torch.tensor([0.0, -0.0, 88.0, -88.0, -104.0, 200.0, -200.0, 1e15, -1e15], device="cuda")
    x = torch.ones(len(gates), 32, device="cuda").to(FLOAT8)
    weight = Float8Weight(
        torch.ones(64, 32, device="cuda").to(FLOAT8), torch.full((64, 1), 1 / 32, device="cuda"), 1, 32
    )
    got = multiply(x, gates, weight, activation="silu").double()
    exact = torch.nn.functional.silu(gates.double()) * gates.double()
    torch.testing.assert_close(got[:, 0], exact, rtol=0.004, atol=1e-30)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, row_scales, weight = operands(300, 1024, 1024)
    alone = multiply(x, row_scales, weight)
    others = x.clone()
    others[1:] = torch.nan
    assert torch.equal(multiply(others, row_scales, weight)[0], alone[0])
