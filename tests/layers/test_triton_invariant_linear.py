"""Row-invariant products against plain torch, and their tilings."""

import pytest
import torch
from fewer import fewer
from triton_layer_cases import assert_as_good_as_torch, everywhere, poisoned_memory, random

from octavo.errors import InvalidArgumentError


@everywhere
@fewer("num_rows", [1, 3, 65, 64, 130])
@pytest.mark.parametrize(("num_columns", "size"), [(1, 1), (37, 45), (64, 256), (130, 300)])
def test_product(device: str, dtype: torch.dtype, num_rows: int, num_columns: int, size: int) -> None:
    from octavo.gemm.portable.invariant import invariant_linear

    # Strided views: rows of a wider tensor, whose other columns must not be read.
    wide = random(num_rows, size + 3, device=device, dtype=dtype)
    wide[:, size:] = torch.nan
    x = wide[:, :size]
    weight = random(num_columns, size, device=device, dtype=dtype, seed=1)
    bias = random(num_columns, device=device, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    with poisoned_memory():
        got = invariant_linear(x, weight)
        biased = invariant_linear(x, weight, bias)
        in_float32 = invariant_linear(x, weight, dtype=torch.float32)
    assert_as_good_as_torch(got, x @ weight.T, exact)
    assert_as_good_as_torch(biased, x @ weight.T + bias, exact + bias.double())
    assert_as_good_as_torch(in_float32, x.float() @ weight.float().T, exact)


@everywhere
def test_more_row_tiles_than_a_group_of_them(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.invariant import invariant_linear
    from octavo.gemm.portable.invariant_tiling import InvariantTiling

    x = random(64 * 10 + 5, 20, device=device, dtype=dtype)
    weight = random(50, 20, device=device, dtype=dtype, seed=1)
    with poisoned_memory():
        got = invariant_linear(x, weight, tiling=InvariantTiling(64, 16, 16, 4, 2))
    assert_as_good_as_torch(got, x @ weight.T, x.double() @ weight.double().T)


@everywhere
def test_neighbours_change_no_bit(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.invariant import invariant_linear

    x = random(70, 96, device=device, dtype=dtype)
    weight = random(40, 96, device=device, dtype=dtype, seed=1)
    expected = invariant_linear(x, weight)[:5]
    others = x.clone()
    others[5:] = torch.nan
    assert torch.equal(invariant_linear(others, weight)[:5], expected)
    assert torch.equal(invariant_linear(x[:5], weight), expected)


@everywhere
def test_layer_keeps_its_weights_and_takes_no_rows(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.invariant import InvariantLinear, invariant_linear

    weight = random(24, 40, device=device, dtype=dtype)
    bias = random(24, device=device, dtype=dtype, seed=1)
    x = random(3, 40, device=device, dtype=dtype, seed=2)
    got = InvariantLinear(weight.T.contiguous().T, bias, dtype=torch.float32)(x)
    assert torch.equal(got, invariant_linear(x, weight, bias, dtype=torch.float32))
    assert InvariantLinear(weight)(x[:0]).shape == (0, 24)


@everywhere
def test_refuses_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.invariant import invariant_linear

    x, weight = (torch.zeros(*shape, device=device, dtype=dtype) for shape in ((2, 8), (6, 8)))
    for bad in (weight.t()[:, :8], x[0]):
        with pytest.raises(InvalidArgumentError, match="x must be"):
            invariant_linear(bad, weight)
    for bad in (weight.double(), weight[:, :7], torch.zeros(8, 6, device=device, dtype=dtype).t()):
        with pytest.raises(InvalidArgumentError, match="weight must be"):
            invariant_linear(x, bad)
    with pytest.raises(InvalidArgumentError, match="bias must be"):
        invariant_linear(x, weight, torch.zeros(5, device=device))


@everywhere
def test_tilings_from_large_to_small(device: str, dtype: torch.dtype) -> None:
    """Large tiles for many rows, enough programs for few; shared memory that an SM has."""
    from octavo.gemm.portable.invariant_tiling import FLOAT32_TILING, HALF_TILINGS, tiling_for

    half = torch.bfloat16
    assert tiling_for(8192, 6144, half, 99) == HALF_TILINGS[0]
    assert tiling_for(1, 151936, half, 99).rows == 64
    assert tiling_for(1, 1024, half, 99) == HALF_TILINGS[-1]
    assert tiling_for(1, 6144, half, 99).columns == 32
    assert tiling_for(8192, 6144, torch.float32, 99) == FLOAT32_TILING
    for tiling in (*HALF_TILINGS, FLOAT32_TILING):
        itemsize = 4 if tiling == FLOAT32_TILING else 2
        stage_bytes = (tiling.rows + tiling.columns) * tiling.depth * itemsize
        assert tiling.num_stages * stage_bytes <= 200 * 1024
        assert tiling.rows == 16 * tiling.num_warps
