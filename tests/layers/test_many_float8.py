"""The GEMM of many float8 rows on a CPU: when it is chosen, its tilings, and the kernel as compiled."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import triton_layer_cases  # noqa: F401  (skips where there is no Triton)
from chosen_products import product_name, take_for_hopper
from compiled_figures import compiled_figures

from octavo.errors import InvalidArgumentError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.hopper.float8 import many_tiling
from octavo.gemm.hopper.float8.many_tiling import tiling_for, unsupported_reason

choose_path = partial(product_name, hopper=["many"])
# Of an SM, but for the system's.
SHARED_BYTES = 227 * 1024


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    take_for_hopper(monkeypatch, many_tiling)


def float8(num_rows: int, size: int, height: int = 1, width: int | None = None) -> Float8Weight:
    width = width or size
    scales = torch.ones(-(-num_rows // height), -(-size // width))
    return Float8Weight(torch.empty(num_rows, size, dtype=FLOAT8), scales, height, width)


@pytest.mark.parametrize(
    ("num_rows", "num_weight_rows", "halves", "adds", "columns"),
    [
        (65, 24576, 2, False, (64, 32)),
        (128, 24576, 2, False, (64, 32)),
        (8192, 24576, 2, False, (64, 32)),
        (128, 6144, 2, False, (32, 0)),
        (128, 6144, 1, False, (64, 0)),
        (256, 6144, 1, False, (128, 0)),
        (512, 6144, 1, False, (128, 64)),
        (128, 4096, 1, True, (32, 0)),
        (256, 4096, 1, True, (64, 0)),
        (512, 4096, 1, True, (128, 0)),
        (8192, 4096, 1, True, (128, 0)),
    ],
)
def test_tiles_of_an_h200(
    num_rows: int, num_weight_rows: int, halves: int, adds: bool, columns: tuple[int, int]
) -> None:
    """What was fastest with 132 programs."""
    tiling = tiling_for(num_rows, num_weight_rows, 132, halves, adds=adds, is_tiled=False)
    assert (tiling.columns, tiling.extra) == columns


def test_buffers_fit_an_sm() -> None:
    cases = product((65, 300, 8192), (512, 4096, 24576), (1, 2), (False, True))
    for num_rows, num_weight_rows, halves, is_tiled in cases:
        tiling = tiling_for(num_rows, num_weight_rows, 132, halves, adds=False, is_tiled=is_tiled)
        width = tiling.columns + tiling.extra
        step = 128 * (128 + halves * width)
        assert tiling.stages >= 4
        assert not is_tiled or (tiling.extra, tiling.span) == (0, 1)
        assert tiling.stages * (step + 16) + 2 * 128 * width <= SHARED_BYTES


def test_the_kernel_spills_nothing() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_many_float8.py"))
    assert len(figures) == 7
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert facts["shared"] <= SHARED_BYTES, name


def test_what_the_kernel_can_read(on_hopper: None) -> None:
    assert unsupported_reason(float8(48, 4112)) is None
    assert unsupported_reason(float8(512, 384, 128, 128)) is None
    for bad in (
        *(float8(40, 4096), float8(48, 4104), float8(48, 64, 2, 64)),
        *(float8(384, 256, 128, 128), float8(256, 320, 128, 128), float8(256, 256, 64, 64)),
    ):
        assert "it needs a weight [N, K] with a scale for each row" in str(unsupported_reason(bad))


def test_many_rows_are_its_work(on_hopper: None) -> None:
    weight = float8(48, 4096)
    assert [choose_path(rows, weight) for rows in (0, 64, 65, 8192)] == ["float8", "float8", "many", "many"]
    narrow = float8(4096, 1024, 128, 128)
    assert [choose_path(rows, narrow) for rows in (64, 65, 256)] == ["float8", "many", "many"]
    assert choose_path(257, narrow) == choose_path(65, float8(4352, 1024, 128, 128)) == "float8"
    # Rows of a single tile have one scale for 128 of them all the same.
    assert choose_path(65, float8(4352, 128, 128, 128)) == "float8"


def test_other_devices_do_without_it() -> None:
    assert "needs a Hopper GPU" in str(unsupported_reason(float8(48, 64)))
    assert choose_path(65, float8(48, 64)) == "torch"


def test_arguments_that_do_not_fit(on_hopper: None) -> None:
    from octavo.gemm.hopper.float8.persistent_gemm import many_linear

    weight, x, scales = float8(64, 128), torch.zeros(65, 128).to(FLOAT8), torch.ones(65)
    options = {"row_scales": scales, "dtype": torch.bfloat16}
    apart = torch.zeros(65, 136).to(FLOAT8)[:, :128]
    for bad in (x[:, :64], x.float(), torch.zeros(128, 65).to(FLOAT8).t(), x[:64], x[0], apart):
        with pytest.raises(
            InvalidArgumentError, match=r"x must be|weight must be|rows of x must begin at 16"
        ):
            many_linear(bad, weight, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="bias"):
        many_linear(x, weight, torch.zeros(63), **options)  # type: ignore[arg-type]
    for name, value in {"activation": "tanh", "residual": torch.zeros(65, 63)}.items():
        with pytest.raises(InvalidArgumentError, match=name):
            many_linear(x, weight, **options, **{name: value})  # type: ignore[arg-type]
    narrow = torch.zeros(65, 66, dtype=torch.bfloat16)[:, :64]
    with pytest.raises(InvalidArgumentError, match="rows of the residual must begin at 16 bytes, got 66"):
        many_linear(x, weight, **options, residual=narrow)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="many_linear cannot run: it needs a weight"):
        many_linear(x, float8(40, 128), **options)  # type: ignore[arg-type]
    assert many_linear(x[:0], weight, row_scales=scales[:0], dtype=torch.bfloat16).shape == (0, 64)
