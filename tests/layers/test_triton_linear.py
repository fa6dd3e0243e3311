"""The skinny GEMM, with all that is fused to it, against plain torch."""

import pytest
import torch
from torch import Tensor
from triton_layer_cases import (
    ACTIVATIONS,
    EPS,
    assert_as_good_as_torch,
    everywhere,
    ignores_overflow,
    plain_linear,
    poisoned_memory,
    random,
)

from octavo.errors import InvalidArgumentError
from octavo.gemm.portable.skinny_tiling import MAX_ROWS, Tiling, tiling_for

pytestmark = ignores_overflow
ROWS = [1, 2, 3, 4]


def check(x: Tensor, weight: Tensor, *, tiling: Tiling | None = None, **options) -> Tensor:
    """Run the kernel on poisoned memory and hold it to twice the error of plain torch."""
    from octavo.gemm.portable.skinny import skinny_linear

    doubled = {
        name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()
    }
    exact = plain_linear(x.double(), weight.double(), **doubled)
    plain = plain_linear(x, weight, **options)
    with poisoned_memory():
        got = skinny_linear(x, weight, **options, eps=EPS, tiling=tiling)
    assert_as_good_as_torch(got, plain, exact)
    return got


@everywhere
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_columns", "size"), [(1, 1), (7, 45), (8, 256), (11, 300)])
def test_product(device: str, dtype: torch.dtype, num_rows: int, num_columns: int, size: int) -> None:
    # Strided views: rows of a wider tensor.
    x = random(num_rows, size + 3, device=device, dtype=dtype)[:, :size]
    weight = random(num_columns, size, device=device, dtype=dtype, seed=1)
    bias = random(num_columns, device=device, dtype=dtype, seed=2)
    check(x, weight)
    check(x, weight, bias=bias)


@everywhere
@pytest.mark.parametrize("norm_dtype", [torch.float32, None])
@pytest.mark.parametrize("num_rows", ROWS)
def test_norm(device: str, dtype: torch.dtype, num_rows: int, norm_dtype: torch.dtype | None) -> None:
    # Rows of very different lengths: one's norm must not reach another.
    x = random(num_rows, 300, device=device, dtype=dtype)
    x *= torch.logspace(-1, 1, num_rows, device=device, dtype=dtype)[:, None]
    weight = random(7, 300, device=device, dtype=dtype, seed=1)
    norm_weight = random(300, device=device, dtype=norm_dtype or dtype, seed=2)
    check(x, weight, norm_weight=norm_weight)


@everywhere
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(device: str, dtype: torch.dtype, num_rows: int, activation: str) -> None:
    x = random(num_rows, 90, device=device, dtype=dtype)
    weight = random(2 * 5, 90, device=device, dtype=dtype, seed=1) / 8
    bias = random(2 * 5, device=device, dtype=dtype, seed=2)
    norm_weight = random(90, device=device, seed=3)
    check(x, weight, activation=activation)
    check(x, weight, bias=bias, norm_weight=norm_weight, activation=activation)


@everywhere
@pytest.mark.parametrize("num_rows", ROWS)
def test_sum_into_the_residual_stream(device: str, dtype: torch.dtype, num_rows: int) -> None:
    x = random(num_rows, 130, device=device, dtype=dtype)
    weight = random(7, 130, device=device, dtype=dtype, seed=1)
    bias = random(7, device=device, dtype=dtype, seed=2)
    wide = random(num_rows + 1, 12, device=device, dtype=dtype, seed=3)
    before = wide.clone()
    residual = wide[:num_rows, :7]
    got = check(x, weight, bias=bias, residual=residual)
    assert got is residual
    assert torch.equal(wide[:, 7:], before[:, 7:])
    assert torch.equal(wide[num_rows], before[num_rows])


@everywhere
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(2, 64, 1),
        Tiling(8, 32, 2),
        Tiling(4, 512, 4),
        Tiling(32, 128, 8),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_any_tiling_computes_the_same(device: str, dtype: torch.dtype, num_rows: int, tiling: Tiling) -> None:
    x = random(num_rows, 200, device=device, dtype=dtype)
    weight = random(2 * 18, 200, device=device, dtype=dtype, seed=1) / 8
    norm_weight = random(200, device=device, seed=2)
    check(x, weight, norm_weight=norm_weight, tiling=tiling)
    check(x, weight, norm_weight=norm_weight, activation="silu", tiling=tiling)


@everywhere
@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_row_does_not_depend_on_the_others(device: str, dtype: torch.dtype, num_rows: int) -> None:
    from octavo.gemm.portable.skinny import skinny_linear

    x = random(num_rows, 96, device=device, dtype=dtype)
    weight = random(10, 96, device=device, dtype=dtype, seed=1)
    norm_weight = random(96, device=device, seed=2)
    options = {"norm_weight": norm_weight, "eps": EPS, "tiling": Tiling(4, 32, 2)}
    whole = skinny_linear(x, weight, **options)
    others = x.clone()
    others[1:] = torch.nan
    assert torch.equal(skinny_linear(others, weight, **options)[0], whole[0])
    if num_rows > 2:
        assert torch.equal(skinny_linear(x[:-1], weight, **options), whole[:-1])
    alike = x[:1].expand(num_rows, -1).contiguous()
    assert torch.equal(skinny_linear(alike, weight, **options), whole[:1].expand_as(whole))


@everywhere
def test_refuses_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.skinny import skinny_linear

    x, weight = (torch.zeros(*shape, device=device, dtype=dtype) for shape in ((2, 8), (6, 8)))
    for bad in (x[:0], torch.zeros(MAX_ROWS + 1, 8, device=device, dtype=dtype), weight.t()[:2], x[0]):
        with pytest.raises(InvalidArgumentError, match="x must be"):
            skinny_linear(bad, weight)
    for bad in (weight.double(), weight[:, :7], torch.zeros(8, 6, device=device, dtype=dtype).t()):
        with pytest.raises(InvalidArgumentError, match="weight must be"):
            skinny_linear(x, bad)
    for name in ("bias", "norm_weight"):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
            skinny_linear(x, weight, **{name: torch.zeros(5, device=device)})
    with pytest.raises(InvalidArgumentError, match="residual must be"):
        skinny_linear(x, weight, residual=x)
    with pytest.raises(InvalidArgumentError, match="did you mean 'silu'"):
        skinny_linear(x, weight, activation="sillu")
    with pytest.raises(InvalidArgumentError, match="even number of columns"):
        skinny_linear(x, weight[:5], activation="silu")
    with pytest.raises(InvalidArgumentError, match="a residual"):
        skinny_linear(x, weight, activation="silu", residual=x[:, :3])


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize("num_weight_rows", [1, 2048, 6144, 151936])
@pytest.mark.parametrize("size", [1, 1024, 3000, 12288])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tilings_can_be_compiled(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> None:
    tiling = tiling_for(num_rows, num_weight_rows, size, dtype)
    assert all(n & (n - 1) == 0 for n in (tiling.columns, tiling.depth, tiling.num_warps))
    assert tiling.columns >= 2
    assert 8 <= tiling.depth <= max(16, 2 * size)
    # More sums than this per thread leave no registers for weights.
    sums = num_rows * tiling.columns * tiling.depth * dtype.itemsize // 16 / (32 * tiling.num_warps)
    assert sums <= 64 or tiling.depth == 16
