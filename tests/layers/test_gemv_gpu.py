"""The GEMV on a Hopper GPU: shapes of decoders, all that it fuses, float8 scales, kernels that overlap."""

import pytest
import torch
from overlap_cases import FeedForwards, random
from overlaps import check_overlap
from torch import Tensor
from torch.nn.functional import silu
from triton_layer_cases import (
    EPS,
    HAS_GPU,
    assert_as_good_as_torch,
    plain_linear,
    plain_norm,
    poisoned_memory,
)

from octavo.forms.float8 import FLOAT8, Float8Weight

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
SHAPES = [(32, 64), (1024, 3072), (6144, 1024), (4096, 12288), (10007, 4096), (2570, 2560), (512, 25600)]


def make_weight(num_rows: int, size: int, tile: int) -> Float8Weight:
    """A weight with scales that differ by a factor of up to 10; tile 0: a scale for each row."""
    height, width = (tile, tile) if tile else (1, size)
    scales = torch.rand(-(-num_rows // height), -(-size // width), device="cuda") * 9 + 1
    values = (torch.randn(num_rows, size, device="cuda") * 50).to(FLOAT8)
    return Float8Weight(values, scales / 5e2 / size**0.5, height, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_shapes_of_decoders(num_rows: int, size: int, dtype: torch.dtype) -> None:
    from octavo.gemm.hopper.floats.float_gemv import gemv_linear

    torch.manual_seed(size)
    x, norm_weight = random(1, size, dtype=dtype), random(size, dtype=dtype)
    weight = random(num_rows, size, dtype=dtype, scale=size**-0.5)
    residual, bias = random(1, num_rows, dtype=dtype), random(num_rows, dtype=dtype)
    with poisoned_memory():
        got = gemv_linear(x, weight, bias, norm_weight=norm_weight, eps=EPS)
    plain = plain_linear(x, weight, bias, norm_weight)
    exact = plain_linear(x.double(), weight.double(), bias.double(), norm_weight.double())
    assert_as_good_as_torch(got, plain, exact)
    expected, exact = residual + x @ weight.T, residual.double() + x.double() @ weight.double().T
    assert gemv_linear(x, weight, residual=residual) is residual
    assert_as_good_as_torch(residual, expected, exact)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_columns", "size"), [(16, 64), (3072, 1024), (5003, 4096)])
def test_gated(num_columns: int, size: int, has_bias: bool, activation: str) -> None:
    from octavo.gemm.hopper.floats.float_gemv import gemv_linear

    torch.manual_seed(size)
    x, norm_weight = random(1, size), random(size)
    weight = random(2 * num_columns, size, scale=size**-0.5)
    bias = random(2 * num_columns) if has_bias else None
    arguments = (x, weight, bias, norm_weight)
    plain = plain_linear(*arguments, activation=activation)
    exact = plain_linear(*(None if a is None else a.double() for a in arguments), activation=activation)  # type: ignore[misc]
    with poisoned_memory():
        got = gemv_linear(x, weight, bias, norm_weight=norm_weight, eps=EPS, activation=activation)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("tile", [0, 64, 128])
@pytest.mark.parametrize(
    ("num_rows", "size"), [(64, 64), (640, 4096), (1280, 12288), (4104, 1920), (256, 25600)]
)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_float8(num_rows: int, size: int, tile: int, magnitude: float) -> None:
    """Rows of any magnitude, with numbers of very different ones: no product is rounded."""
    from octavo.gemm.hopper.floats.float_gemv import gemv_linear

    torch.manual_seed(size)
    weight = make_weight(num_rows, size, tile)
    dense = weight.dequantise().double()
    x = random(1, size) * magnitude
    x[:, ::7] *= 1e-4
    exact = x.double() @ dense.T
    got = gemv_linear(x, weight)
    assert_as_good_as_torch(got, exact.to(torch.bfloat16), exact)
    if magnitude > 1:
        return  # The square that a norm takes is infinite.
    norm_weight, bias = random(size), random(num_rows)
    normed = plain_norm(x.double(), norm_weight.double(), EPS) @ dense.T + bias.double()
    got = gemv_linear(x, weight, bias, norm_weight=norm_weight, eps=EPS)
    torch.testing.assert_close(got.double(), normed, rtol=0.01, atol=0.01 * normed.abs().max().item())
    if num_rows % 256 == 0:
        gate, up = (x.double() / magnitude @ dense.T).chunk(2, -1)
        got = gemv_linear(x / magnitude, weight, activation="silu")
        exact = silu(gate) * up
        assert ((got.double() - exact).norm() / exact.norm()).item() < 0.006


def test_zeros_and_what_is_no_number() -> None:
    from octavo.gemm.hopper.floats.float_gemv import gemv_linear

    for weight in (make_weight(64, 256, 0), random(64, 256)):
        x = torch.zeros(1, 256, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(gemv_linear(x, weight), torch.zeros_like(x[:, :64]))
        x[0, 3] = torch.nan
        assert gemv_linear(x, weight).isnan().all()


@pytest.mark.parametrize("tile", [None, 0, 128])
def test_overlapping_kernels_give_the_same_bits_in_and_out_of_graphs(
    tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.gemm.hopper.floats.float_gemv import gemv_linear

    def weight(rows: int, size: int, scale: float) -> Tensor | Float8Weight:
        return random(rows, size, scale=scale) if tile is None else make_weight(rows, size, tile)

    check_overlap(FeedForwards(gemv_linear, 1, weight), monkeypatch)
