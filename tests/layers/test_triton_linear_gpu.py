"""The skinny GEMM on a real GPU: the shapes of decoders, CUDA graphs, kernels that overlap."""

import pytest
import torch
from overlap_cases import FeedForwards, random
from overlaps import check_overlap
from torch import Tensor
from triton_layer_cases import EPS, HAS_GPU, assert_as_good_as_torch, plain_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_columns", "size"), [(1024, 3072), (6144, 1024), (4096, 12288), (10007, 4096)])
def test_shapes_of_decoders(num_columns: int, size: int, num_rows: int, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.skinny import skinny_linear

    torch.manual_seed(num_rows)
    x, norm_weight = random(num_rows, size, dtype=dtype), random(size, dtype=dtype)
    weight = random(num_columns, size, dtype=dtype, scale=size**-0.5)
    residual = random(num_rows, num_columns, dtype=dtype)
    exact_norm = plain_norm(x.double(), norm_weight.double(), EPS)
    got = skinny_linear(x, weight, norm_weight=norm_weight, eps=EPS)
    plain = plain_norm(x, norm_weight, EPS) @ weight.T
    assert_as_good_as_torch(got, plain, exact_norm @ weight.double().T)
    expected, exact = residual + x @ weight.T, residual.double() + x.double() @ weight.double().T
    assert_as_good_as_torch(skinny_linear(x, weight, residual=residual), expected, exact)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_overlapping_kernels_give_the_same_bits_in_and_out_of_graphs(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.gemm.portable.skinny import skinny_linear

    def weight(rows: int, size: int, scale: float) -> Tensor:
        return random(rows, size, scale=scale)

    check_overlap(FeedForwards(skinny_linear, num_rows, weight), monkeypatch)
