"""The GEMV of packed weights on a Hopper GPU: shapes of decoders, all it fuses, kernels that overlap."""

import pytest
import torch
from grouped_cases import both_ways, options_of, packed, random_blocks
from overlap_cases import FeedForwards
from overlaps import check_overlap
from triton_layer_cases import EPS, HAS_GPU, assert_as_good_as_torch, poisoned_memory, random

from octavo.gemm.hopper.floats.dense_gemv_tiling import GemvTiling
from octavo.gemm.hopper.packed.packed_gemv_tiling import GROUP

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
SHAPES = [(32, 128), (1024, 3072), (6144, 1024), (4096, 12288), (10008, 4096), (2568, 2560), (512, 16384)]
FUSED = [
    [],
    ["bias"],
    ["norm", "silu"],
    ["gelu", "bias"],
    ["residual", "bias"],
    ["norm", "bias", "gelu_tanh"],
]


def make_weight(num_rows: int, size: int):
    """A weight with scales that differ by a factor of up to 11."""
    return packed(random_blocks(num_rows, size, group=GROUP), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_shapes_of_decoders(num_rows: int, size: int, dtype: torch.dtype) -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    weight = make_weight(num_rows, size)
    x = random(1, size, device="cuda", dtype=dtype)
    for names in (["norm", "bias"], ["residual"]):
        options = options_of(names, 1, num_rows, size, "cuda", dtype)
        plain, exact = both_ways(x, weight, **options)
        with poisoned_memory():
            got = packed_gemv_linear(x, weight, **options, eps=EPS)
        assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("names", FUSED)
@pytest.mark.parametrize("shape", [(64, 256), (6144, 1152), (2 * 5000, 4096)])
def test_what_is_fused(names: list[str], shape: tuple[int, int]) -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    weight = make_weight(*shape)
    x = random(1, shape[1], device="cuda", dtype=torch.bfloat16)
    options = options_of(names, 1, *shape, "cuda", torch.bfloat16)
    plain, exact = both_ways(x, weight, **options)
    with poisoned_memory():
        got = packed_gemv_linear(x, weight, **options, eps=EPS)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("tiling", [GemvTiling(1, 2, 80), GemvTiling(2, 2, 80), GemvTiling(1, 5, 80)])
def test_tilings_give_the_same(tiling: GemvTiling) -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    weight = make_weight(2 * 1000, 4096)
    x = random(1, 4096, device="cuda", dtype=torch.bfloat16)
    options = options_of(["norm", "silu"], 1, 2000, 4096, "cuda", torch.bfloat16)
    got = packed_gemv_linear(x, weight, **options, eps=EPS, tiling=tiling)
    assert_as_good_as_torch(got, *both_ways(x, weight, **options))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1.0, 1e30])
def test_rows_of_any_magnitude(magnitude: float) -> None:
    """With numbers of very different ones: what is lost is 2^-29 of the largest number."""
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    weight = make_weight(640, 4096)
    x = random(1, 4096, device="cuda", dtype=torch.bfloat16) * magnitude
    x[:, ::7] *= 1e-4
    exact = x.double() @ weight.dequantise().double().T
    assert_as_good_as_torch(packed_gemv_linear(x, weight), exact.to(torch.bfloat16), exact)


def test_zeros_and_what_is_no_number() -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    weight = make_weight(64, 256)
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(packed_gemv_linear(x, weight), torch.zeros_like(x[:, :64]))
    for bad in (torch.nan, torch.inf):
        x[0, 3] = bad
        assert not packed_gemv_linear(x, weight).isfinite().any()


def test_overlapping_kernels_give_the_same_bits_in_and_out_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear

    check_overlap(FeedForwards(packed_gemv_linear, 1, lambda *shape: make_weight(*shape[:2])), monkeypatch)
