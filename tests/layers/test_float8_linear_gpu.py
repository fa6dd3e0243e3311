"""Layers of float8 weights on a GPU, in the shapes of real models, by every path, against float64."""

from dataclasses import replace

import pytest
import torch
from chosen_products import product_name
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.make_linear import make_quantised_linear
from octavo.gemm.product import MANY, available
from octavo.gemm.table import PRODUCTS
from octavo.layers import BlockInput, BlockOutput, RMSNorm
from octavo.parallel import TensorParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# Relative error that rounding rows to float8 makes; an activation of two products doubles it.
ROUNDING, RESULT = 0.03, 0.006
ROWS = {
    "gemv": (1,),
    "skinny": (1, 3),
    "hopper": (1, 8, 33, 64, 200),
    "float8": (2, 17, 64, 300),
    "many": (65, 300),
    "torch": (64, 300),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator)


def make_weight(num_rows: int, size: int, tile: int) -> Float8Weight:
    """A weight with scales that differ by a factor of up to 10; tile 0: a scale for each row."""
    height, width = (tile, tile) if tile else (1, size)
    scales = torch.rand(-(-num_rows // height), -(-size // width), device="cuda") * 9 + 1
    return Float8Weight((random(num_rows, size, seed=1) * 50).to(FLOAT8), scales / 5e4, height, width)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


@pytest.mark.parametrize("path", ROWS)
@pytest.mark.parametrize("tile", [0, 128])
@pytest.mark.parametrize(("num_weight_rows", "size"), [(6144, 4096), (4096, 1024), (512, 3072), (2048, 640)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_path_computes_the_product(
    path: str,
    tile: int,
    num_weight_rows: int,
    size: int,
    activation: str | None,
) -> None:
    weight = make_weight(num_weight_rows, size, tile)
    bias = random(num_weight_rows, seed=2).bfloat16()
    norm = RMSNorm(random(size, seed=3).bfloat16(), 1e-6)
    layer = make_quantised_linear([weight], bias, dtype=torch.bfloat16)
    assert isinstance(layer, GpuLinear)
    rows = [row for row in PRODUCTS["float8"] if row.name == path]
    assert rows, path
    everywhere = [replace(row, rows=(0, MANY), where=row.where if path == "torch" else None) for row in rows]
    layer.products = available(everywhere, weight)
    if not layer.products:
        pytest.skip("this GPU or CUDA does not have it")
    dense = weight.dequantise().double()
    allowed = RESULT if path in ("gemv", "skinny") else ROUNDING * (1 if activation is None else 1.7)
    for num_rows in ROWS[path]:
        hidden, delta = random(num_rows, size).bfloat16(), random(num_rows, size, seed=4).bfloat16()
        stream = hidden.clone()
        got = BlockInput(norm, layer, activation)(stream, delta)
        torch.testing.assert_close(stream, hidden + delta)
        out = rms_norm(stream.double(), (size,), norm.weight.double(), 1e-6) @ dense.T + bias.double()
        if activation is not None:
            gate, up = out.chunk(2, -1)
            out = silu(gate) * up
        assert relative_error(got, out) < allowed, num_rows
        if activation is None:
            stream = random(num_rows, num_weight_rows, seed=5).bfloat16()
            exact = stream.double() + hidden.double() @ dense.T + bias.double()
            assert BlockOutput(layer, None, TensorParallel())(hidden, stream) is None
            assert relative_error(stream, exact) < allowed, num_rows


@pytest.mark.parametrize("tile", [0, 128])
def test_a_row_does_not_depend_on_the_others(tile: int) -> None:
    layer = GpuLinear(make_weight(1024, 2048, tile))
    for num_rows in (2, 16, 64, 300):
        x = random(num_rows, 2048).bfloat16()
        others = x.clone()
        others[1:] = torch.nan
        assert torch.equal(layer(others)[0], layer(x)[0]), product_name(num_rows, layer.weight)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 64, 65, 256, 257, 1000])
@pytest.mark.parametrize(("num_weight_rows", "size"), [(1024, 2048), (40, 96), (100, 1000)])
def test_any_number_of_rows_and_columns(num_rows: int, num_weight_rows: int, size: int) -> None:
    weight = make_weight(num_weight_rows, size, 0)
    x = random(num_rows, size).bfloat16()
    got = GpuLinear(weight)(x)
    assert got.shape == (num_rows, num_weight_rows)
    if num_rows:
        exact = x.double() @ weight.dequantise().double().T
        # Over all rows: with few columns a single row's error is up to twice the typical one.
        assert (got.double() - exact).norm() / exact.norm() < 1.2 * ROUNDING


def test_it_runs_in_a_cuda_graph() -> None:
    layers = [GpuLinear(make_weight(1024, 1024, tile)) for tile in (0, 128)]
    for num_rows in (1, 16, 300):
        x = random(num_rows, 1024).bfloat16()
        expected = [layer(x) for layer in layers]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [layer(x) for layer in layers]
        graph.replay()
        torch.cuda.synchronize()
        for first, second in zip(got, expected, strict=True):
            assert torch.equal(first, second)
