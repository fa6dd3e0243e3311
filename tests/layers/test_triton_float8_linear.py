"""GEMMs of float8 weights, with all that is fused to them, against the dequantised weight in float64."""

import pytest
import torch
from torch import Tensor
from triton_layer_cases import (
    EPS,
    assert_as_good_as_torch,
    everywhere,
    ignores_overflow,
    plain_linear,
    poisoned_memory,
    random,
)

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import Float8Weight, quantise, quantise_rows
from octavo.gemm.portable.float8_tiling import Float8Tiling, tiling_for
from octavo.gemm.portable.skinny_tiling import Tiling

pytestmark = ignores_overflow
# Height and width of a tile; 0: a scale for each row.
TILES = [(1, 0), (32, 32), (16, 64)]
SMALL = Float8Tiling(rows=16, columns=16, depth=32, num_warps=4, num_stages=2)


def make_weight(
    num_rows: int, size: int, tile: tuple[int, int], device: str, seed: int = 1, scale: float = 1.0
) -> Float8Weight:
    """A random weight whose scales differ by a factor of up to 4."""
    height, width = tile[0], tile[1] or size
    values = random(num_rows, size, device=device, seed=seed) * 100
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(-(-num_rows // height), -(-size // width), generator=generator) * 3 + 1
    return Float8Weight(values.to(torch.float8_e4m3fn), (scales * scale / 100).to(device), height, width)


def check(x: Tensor, weight: Float8Weight, *, few: bool, **options) -> Tensor:
    """Run a kernel on poisoned memory and hold it to twice the error of torch with dequantised weights.

    few: by the skinny GEMM; else x is rounded to float8 first.
    """
    from octavo.gemm.portable.float8_gemm import float8_linear
    from octavo.gemm.portable.skinny import skinny_linear

    dtype, values, scales = x.dtype, *quantise_rows(x)
    exact_x = x.double() if few else values.double() * scales.double()
    doubled = {name: each.double() if isinstance(each, Tensor) else each for name, each in options.items()}
    dense = weight.dequantise()
    exact = plain_linear(exact_x, dense.double(), **doubled)
    plain = plain_linear(exact_x.to(dtype), dense.to(dtype), **options)
    with poisoned_memory():
        if few:
            got = skinny_linear(x, weight, **options, eps=EPS, tiling=Tiling(4, 64, 1))
        else:
            got = float8_linear(values, weight, **options, row_scales=scales, dtype=dtype, tiling=SMALL)
    assert_as_good_as_torch(got, plain, exact)
    return got


@everywhere
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("num_rows", "num_columns", "size"), [(1, 37, 45), (3, 48, 200)])
@pytest.mark.parametrize("few", [True, False])
def test_product(
    device: str,
    dtype: torch.dtype,
    few: bool,
    num_rows: int,
    num_columns: int,
    size: int,
    tile: tuple[int, int],
) -> None:
    # Strided views: rows of a wider tensor.
    x = random(num_rows, size + 8, device=device, dtype=dtype)[:, :size]
    bias = random(num_columns, device=device, dtype=dtype, seed=2)
    check(x, make_weight(num_columns, size, tile, device), few=few, bias=bias)


@everywhere
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_norm_and_gated_activation(
    device: str, dtype: torch.dtype, activation: str, tile: tuple[int, int]
) -> None:
    x = random(2, 90, device=device, dtype=dtype)
    weight = make_weight(2 * 32, 90, tile, device, scale=1 / 8)
    norm_weight = random(90, device=device, seed=3)
    check(x, weight, few=True, norm_weight=norm_weight, activation=activation)
    check(x, weight, few=False, activation=activation)


@everywhere
@pytest.mark.parametrize("few", [True, False])
def test_sum_into_the_residual_stream(device: str, dtype: torch.dtype, few: bool) -> None:
    x = random(3, 130, device=device, dtype=dtype)
    wide = random(4, 50, device=device, dtype=dtype, seed=3)
    before, residual = wide.clone(), wide[:3, :45]
    got = check(x, make_weight(45, 130, (32, 32), device), few=few, residual=residual)
    assert got is residual
    assert torch.equal(wide[:, 45:], before[:, 45:])
    assert torch.equal(wide[3], before[3])


@everywhere
def test_a_row_does_not_depend_on_the_others(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.float8_gemm import float8_linear

    weight, x = make_weight(40, 96, (32, 32), device), random(5, 96, device=device, dtype=dtype)
    alone, together = (
        float8_linear(values, weight, row_scales=scales, dtype=dtype, tiling=SMALL)
        for values, scales in (quantise_rows(x[:1]), quantise_rows(x))
    )
    assert torch.equal(alone[0], together[0])


@everywhere
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("width", [None, 32])
def test_quantised_rows(
    device: str, dtype: torch.dtype, has_norm: bool, has_delta: bool, width: int | None
) -> None:
    from octavo.kernels.rms_norm import quantise_rows as triton_quantise_rows

    x = random(5, 100, device=device, dtype=dtype)[:, :96] * torch.logspace(-2, 2, 5, device=device)[:, None]
    x = x.to(dtype)
    x[3] = 0
    delta = random(5, 96, device=device, dtype=dtype, seed=1) if has_delta else None
    weight = random(96, device=device, seed=2) if has_norm else None
    # The stream is scaled only where a delta is added to it.
    total = x.clone() if delta is None else x * 0.5 + delta
    values, scales = triton_quantise_rows(x, weight, EPS, delta=delta, stream_scale=0.5, width=width)
    assert torch.equal(x, total)
    exact = total.float()
    if weight is not None:
        exact = exact * torch.rsqrt(exact.square().mean(-1, True) + EPS) * weight
    expected, expected_scales = quantise_rows(exact.reshape(-1, width or 96))
    torch.testing.assert_close(scales, expected_scales.view(scales.shape), rtol=1e-5, atol=0)
    got, wanted = values.float(), expected.float().view(values.shape)
    # A number in the middle of two of float8 may become either.
    torch.testing.assert_close(got, wanted, rtol=0.13, atol=0.002)
    assert (got != wanted).float().mean() < 0.02


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@everywhere
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [None, 32])
def test_rows_with_what_is_no_number_show_it(
    device: str, dtype: torch.dtype, value: float, width: int | None
) -> None:
    """Trap: a GPU's minimum of NaN and 448 is 448, and such a row's product looked like numbers."""
    from octavo.kernels.rms_norm import quantise_rows as triton_quantise_rows

    x = random(3, 96, device=device, dtype=dtype)
    x[1, 40] = value
    values, scales = triton_quantise_rows(x, width=width)
    product = values.float() * scales.view(-1, 3).T.repeat_interleave(width or 96, 1)
    assert product[1, 40].isnan()
    assert product[[0, 2]].isfinite().all()


@everywhere
def test_refuses_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.float8_gemm import float8_linear
    from octavo.gemm.portable.skinny import skinny_linear

    x, weight = random(2, 64, device=device, dtype=dtype), make_weight(32, 64, (1, 0), device)
    values, scales = quantise_rows(x)
    rows = {"row_scales": scales, "dtype": dtype}
    with pytest.raises(InvalidArgumentError, match="x must be float8 with a scale for each row"):
        float8_linear(x, weight, **rows)
    with pytest.raises(InvalidArgumentError, match="a scale for each row"):
        float8_linear(values, weight, row_scales=scales[:1], dtype=dtype)
    for product, operand, options in ((float8_linear, values, rows), (skinny_linear, x, {})):
        with pytest.raises(InvalidArgumentError, match="weight must be"):
            product(operand[:, :32], weight, **options)
        with pytest.raises(InvalidArgumentError, match="residual must be"):
            product(operand, weight, residual=x, **options)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 256, 8192])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (64, 48), (24576, 4096)])
def test_tilings_can_be_compiled(num_rows: int, shape: tuple[int, int]) -> None:
    tiling = tiling_for(num_rows, *shape)
    sizes = (tiling.rows, tiling.columns, tiling.depth, tiling.num_warps)
    assert all(n & (n - 1) == 0 for n in sizes)
    assert min(tiling.rows, tiling.columns) >= 16
    assert tiling.depth >= 32
    per_stage = tiling.depth * (tiling.columns + tiling.rows)
    assert per_stage * tiling.num_stages <= 200 * 1024


def test_rounding_a_weight_is_as_exact_as_float8() -> None:
    weight = torch.randn(700, 40) * torch.logspace(-4, 3, 700)[:, None]
    weight[5] = 0
    rounded = quantise(weight)
    assert rounded.scales.shape == (700, 1)
    largest = weight.abs().amax(-1, True)
    # Half a step of 3 bits of mantissa, or of the smallest numbers.
    assert ((rounded.dequantise() - weight).abs() <= weight.abs() / 16 + largest / 448 * 2**-10 + 1e-30).all()
