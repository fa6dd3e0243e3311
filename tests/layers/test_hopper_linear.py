"""The GEMM for Hopper GPUs on a CPU: when it can run and when it is chosen, its tilings, what it refuses."""

import pytest
import torch
import triton_layer_cases  # noqa: F401  (skips where there is no Triton)
from chosen_products import product_name, take_for_hopper

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.hopper.floats import dense_gemm_tiling as hopper_tiling
from octavo.gemm.hopper.floats.dense_gemm_tiling import (
    ATOM,
    GROUP_ROWS,
    HopperTiling,
    fill_tiling,
    hopper_tiling_for,
    unsupported_reason,
)

HALF = torch.bfloat16
SHARED_BYTES = 227 * 1024


def shared_bytes(
    rows: int, columns: int, depth: int, weight_stages: int, row_stages: int, halves: int
) -> int:
    """What the kernel allocates, but for barriers."""
    spare = GROUP_ROWS - rows
    return 2 * (depth * (row_stages * rows + weight_stages * columns * halves) + spare * ATOM)


@pytest.mark.parametrize("num_rows", [2, 8, 9, 16, 37, 64, 65, 128, 192, 256])
@pytest.mark.parametrize("num_weight_rows", [16, 1024, 6144, 24576])
@pytest.mark.parametrize("size", [64, 1024, 3072, 12288])
@pytest.mark.parametrize("is_gated", [False, True])
def test_tilings_fit(num_rows: int, num_weight_rows: int, size: int, is_gated: bool) -> None:
    tiling = hopper_tiling_for(num_rows, num_weight_rows, size, is_gated=is_gated)
    halves = 2 if is_gated else 1
    assert tiling.rows in (8, 16, 32, 64)
    assert tiling.columns * halves in (8, 16, 32, 64, 128)
    assert tiling.depth % ATOM == 0
    assert tiling.weight_stages >= tiling.row_stages >= min(2, -(-size // tiling.depth))
    used = shared_bytes(
        tiling.rows, tiling.columns, tiling.depth, tiling.weight_stages, tiling.row_stages, halves
    )
    assert used <= SHARED_BYTES - 2048


def test_all_weights_come_early_if_they_fit() -> None:
    tiling = fill_tiling(64, 8, 2048, is_gated=False, shared_bytes=100 * 1024)
    assert tiling.depth * tiling.weight_stages == 2048
    more = fill_tiling(64, 8, 2048, is_gated=False)
    assert more.row_stages > tiling.row_stages


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, hopper_tiling)


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    x, weight = torch.zeros(8, 128, dtype=HALF), torch.zeros(32, 128, dtype=HALF)
    assert unsupported_reason(x, weight) is None
    assert unsupported_reason(torch.zeros(8, 256, dtype=HALF)[:, 128:], weight) is None
    for bad_x, bad_weight in (
        (x.float(), weight.float()),
        (x, weight.half()),
        (x[:, :64], weight),
        (x[:, :64], weight[:, :64]),
        (x, weight[:24]),
        (torch.zeros(8, 132, dtype=HALF)[:, :128], weight),
        (torch.zeros(8, 136, dtype=HALF)[:, 4:132], weight),
        (x[0], weight),
        (x[:0], weight),
        (x, weight[:0]),
    ):
        assert "must be bfloat16 or float16" in str(unsupported_reason(bad_x, bad_weight))


def test_a_cpu_does_not_use_it() -> None:
    x, weight = torch.zeros(8, 128, dtype=HALF), torch.zeros(32, 128, dtype=HALF)
    assert "needs a Hopper GPU" in str(unsupported_reason(x, weight))
    assert product_name(x, weight) == "plain"


def test_what_pays_off(on_hopper: None) -> None:
    """By rows, at each of the chooser's limits."""

    def chosen(num_rows: int, num_columns: int, size: int) -> str:
        x, weight = (torch.empty(rows, size, dtype=HALF) for rows in (num_rows, num_columns))
        return product_name(x, weight, hopper=["hopper"])

    assert chosen(0, 64, 64) == "plain"
    assert chosen(1, 65536, 4096) == "skinny"
    assert [chosen(2, *sizes) for sizes in ((64, 64), (64, 4096), (65536, 64))] == ["hopper"] * 3
    assert [chosen(2, *sizes) for sizes in ((64, 96), (64, 4128), (65536, 96))] == [
        "skinny",
        "plain",
        "plain",
    ]
    assert [chosen(rows, 64, 64) for rows in (2, 256, 257)] == ["hopper", "hopper", "plain"]
    assert [chosen(rows, 2064, 64) for rows in (2, 128, 129)] == ["hopper", "hopper", "plain"]
    for columns, size in ((64, 4096), (4096, 1088), (6144, 1024), (65536, 128)):
        assert [chosen(rows, columns, size) for rows in (2, 64, 65)] == ["hopper", "hopper", "plain"]
    assert [chosen(rows, 4096, 1024) for rows in (2, 128, 129)] == ["hopper", "hopper", "plain"]
    assert [chosen(rows, 64, 96) for rows in (4, 5)] == ["skinny", "plain"]


@pytest.mark.parametrize(
    ("num_weight_rows", "width", "first", "last"),
    [(4096, 512, 2, 64), (4096, 128, 2, 64), (16352, 512, 2, 64), (16352, 128, 2, 64), (16384, 512, 33, 64)],
)
def test_rows_of_float8(on_hopper: None, num_weight_rows: int, width: int, first: int, last: int) -> None:
    """By rows, at each of the chooser's limits: weights of some rows and of many."""
    height = 1 if width == 512 else 128
    scales = torch.ones(-(-num_weight_rows // height), 512 // width)
    weight = Float8Weight(torch.empty(num_weight_rows, 512, dtype=FLOAT8), scales, height, width)
    assert [product_name(rows, weight) == "hopper" for rows in (first - 1, first, last, last + 1)] == [
        False,
        True,
        True,
        False,
    ]
    wide = Float8Weight(torch.empty(16384, 512, dtype=FLOAT8), torch.ones(128, 4), 128, 128)
    assert [product_name(rows, wide) for rows in (2, 64)] == ["float8", "float8"]
    long = Float8Weight(torch.empty(16384, 4096, dtype=FLOAT8), torch.ones(16384, 1), 1, 4096)
    assert [product_name(rows, long) for rows in (2, 64)] == ["hopper", "hopper"]


def test_arguments_that_do_not_fit(on_hopper: None) -> None:
    from octavo.gemm.hopper.floats.dense_gemm import hopper_linear

    x, weight = torch.zeros(8, 128, dtype=HALF), torch.zeros(32, 128, dtype=HALF)
    with pytest.raises(InvalidArgumentError, match="must be bfloat16 or float16"):
        hopper_linear(x.float(), weight)
    with pytest.raises(InvalidArgumentError, match="bias must be"):
        hopper_linear(x, weight, torch.zeros(16, dtype=HALF))
    with pytest.raises(InvalidArgumentError, match="did you mean 'silu'"):
        hopper_linear(x, weight, activation="sillu")
    with pytest.raises(InvalidArgumentError, match="a residual"):
        hopper_linear(x, weight, activation="silu", residual=torch.zeros(8, 16, dtype=HALF))
    with pytest.raises(InvalidArgumentError, match="residual must be"):
        hopper_linear(x, weight, residual=x)
    with pytest.raises(InvalidArgumentError, match="a tiling needs"):
        hopper_linear(x, weight, tiling=HopperTiling(16, 16, 64, 1, 1))
    with pytest.raises(InvalidArgumentError, match="a tiling needs"):
        hopper_linear(x, weight, tiling=HopperTiling(16, 16, 64, 2, 3))
