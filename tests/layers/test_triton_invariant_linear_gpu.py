"""Row-invariant products on a real GPU: the same bits in any batch, tiling and graph."""

import pytest
import torch
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]
# Shapes of decoders; sizes that no tiling's depth divides, and that 16 bytes do not.
SHAPES = [(1024, 3072), (6144, 1024), (10007, 4096), (37, 1096), (130, 45)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*sizes: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


def case(num_columns: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [1000, size], weight, bias."""
    torch.manual_seed(num_columns)
    weight = random(num_columns, size, dtype=dtype, scale=size**-0.5)
    return random(1000, size, dtype=dtype), weight, random(num_columns, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_columns", "size"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    num_columns: int, size: int, dtype: torch.dtype
) -> None:
    from octavo.gemm.portable.invariant import invariant_linear

    x, weight, bias = case(num_columns, size, dtype)
    whole = invariant_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert_as_good_as_torch(whole, x @ weight.T + bias, exact)
    for num_rows in (1, 3, 17, 64, 65, 300, 1000):
        for first in {0, (1000 - num_rows) // 2, 1000 - num_rows}:
            got = invariant_linear(x[first : first + num_rows], weight, bias)
            assert torch.equal(got, whole[first : first + num_rows]), (num_rows, first)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("num_columns", "size"), SHAPES)
def test_all_tilings_give_the_same_bits(num_columns: int, size: int, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.invariant import invariant_linear
    from octavo.gemm.portable.invariant_tiling import HALF_TILINGS

    x, weight, bias = case(num_columns, size, dtype)
    expected = invariant_linear(x, weight, bias, dtype=torch.float32, tiling=HALF_TILINGS[0])
    for tiling in HALF_TILINGS[1:]:
        got = invariant_linear(x, weight, bias, dtype=torch.float32, tiling=tiling)
        assert torch.equal(got, expected), tiling


def test_replays_in_a_cuda_graph() -> None:
    from octavo.gemm.portable.invariant import invariant_linear

    x, weight, bias = case(1024, 3072, torch.bfloat16)
    expected = invariant_linear(x, weight, bias)[:7]
    rows = x[:7].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = invariant_linear(rows, weight, bias)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
