"""The product of 17 to 256 rows and a weight of 4 bits on a Hopper GPU: forms, epilogues, ragged sizes."""

import pytest
import torch
from grouped_cases import both_ways, options_of, packed, random_blocks
from torch import Tensor
from triton_layer_cases import HAS_GPU, assert_as_good_as_torch, poisoned_memory, random, with_nan_behind

from octavo.forms.packed import PackedWeight
from octavo.gemm.hopper.packed import packed_gemm as gemm
from octavo.gemm.hopper.packed.packed_gemm_tiling import HopperMediumTiling, make_tiling
from octavo.kernels import launch as triton_launch

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
DTYPES = [torch.bfloat16, torch.float16]
FUSED = [[], ["bias"], ["silu"], ["gelu", "bias"], ["residual"], ["residual", "bias"]]


def check(x: Tensor, weight: PackedWeight, tiling: HopperMediumTiling | None = None, **options) -> None:
    """Run the kernel on poisoned memory and hold it to twice the error of plain torch."""
    plain, exact = both_ways(x, weight, **options)
    with poisoned_memory():
        got = gemm.hopper_medium_linear(x, weight, tiling=tiling, **options)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128, 4096])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("num_rows", [17, 32, 33, 64, 70, 100, 128, 129, 192, 200, 256])
def test_forms_of_weights(dtype: torch.dtype, group: int, mins: bool, num_rows: int) -> None:
    weight = packed(random_blocks(1536, 4096, group=group, mins=mins), "cuda")
    check(random(num_rows, 4096, device="cuda", dtype=dtype), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_weight_rows", "size"), [(16, 64), (36, 320), (1028, 96), (1000, 2880)])
@pytest.mark.parametrize("num_rows", [17, 61, 131])
@pytest.mark.parametrize("programs", [None, 1, 7])
def test_sizes_that_are_no_multiple_of_a_tile(
    dtype: torch.dtype, num_weight_rows: int, size: int, num_rows: int, programs: int | None
) -> None:
    weight = packed(random_blocks(num_weight_rows, size, group=32), "cuda")
    # Rows of a wider tensor.
    x = random(num_rows, size + 8, device="cuda", dtype=dtype)[:, :size]
    check(x, weight, None if programs is None else make_tiling(128, 1, programs, 1, 32))


def test_a_single_group() -> None:
    """A scale and a minimum for each row of the weight."""
    weight = packed(random_blocks(64, 256, group=256), "cuda")
    check(random(40, 256, device="cuda", dtype=torch.bfloat16), weight)


@pytest.mark.parametrize("num_rows", [17, 40, 70, 130])
def test_what_lies_behind_the_last_row(num_rows: int) -> None:
    x = with_nan_behind(random(num_rows, 640, device="cuda", dtype=torch.bfloat16))
    check(x, packed(random_blocks(1000, 640, group=64), "cuda"))


@pytest.mark.parametrize("names", FUSED)
@pytest.mark.parametrize("programs", [1, 16, 29, 80])
@pytest.mark.parametrize("form", [(32, 1, 2), (32, 3, 1), (64, 1, 1), (64, 3, 1), (128, 1, 1)])
def test_what_is_fused(names: list[str], programs: int, form: tuple[int, int, int]) -> None:
    """By programs that have many tiles, whole ones, parts of two or three, and a single span."""
    rows, blocks, per_sm = form
    weight = packed(random_blocks(2 * 1000, 1280, group=64), "cuda")
    # Of the largest forms, one group of rows.
    num_rows = min(77, 2 * rows * blocks)
    x = random(num_rows, 1280, device="cuda", dtype=torch.bfloat16)
    options = options_of(names, num_rows, 2000, 1280, "cuda", torch.bfloat16)
    check(x, weight, make_tiling(rows, blocks, programs, per_sm, 64), **options)


@pytest.mark.parametrize("programs", [1, 5, 13, 132, 264, 1000])
@pytest.mark.parametrize("num_rows", [20, 60])
def test_programs_that_share_tiles(programs: int, num_rows: int) -> None:
    """Also more than run at a time. They leave their counters as they were, and add up alike each time."""
    weight = packed(random_blocks(4096, 4096, group=128), "cuda")
    x = random(num_rows, 4096, device="cuda", dtype=torch.bfloat16)
    tiling = make_tiling(32, 1, programs, 2)
    check(x, weight, tiling)
    first = gemm.hopper_medium_linear(x, weight, tiling=tiling)
    assert not weight.arrivals.any()
    for _ in range(20):
        assert torch.equal(first, gemm.hopper_medium_linear(x, weight, tiling=tiling))


@pytest.mark.parametrize("stages", [(4, 2, 2), (4, 2, 5), (4, 3, 3), (2, 2, 2), (2, 4, 2), (2, 4, 3)])
def test_few_buffers(stages: tuple[int, int, int]) -> None:
    """Each is used again and again."""
    weight = packed(random_blocks(512, 4096, group=128), "cuda")
    x = random(64, 4096, device="cuda", dtype=torch.bfloat16)
    check(x, weight, HopperMediumTiling(64, 1, *stages, programs=9))


@pytest.mark.parametrize("overlaps", [False, True])
def test_kernels_that_follow_one_another(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what the one before wrote."""
    monkeypatch.setattr(triton_launch, "OVERLAP", overlaps)
    weights = [packed(random_blocks(1024, 1024, group=128, seed=seed), "cuda") for seed in range(8)]
    x = random(128, 1024, device="cuda", dtype=torch.bfloat16)
    got = x
    for weight in weights:
        before = got
        got = gemm.hopper_medium_linear(before, weight)
    torch.cuda.synchronize()
    assert_as_good_as_torch(got, *both_ways(before, weights[-1]))


def test_a_row_does_not_depend_on_the_others() -> None:
    weight = packed(random_blocks(1536, 4096, group=128), "cuda")
    x = random(128, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.cat((x[:50], 100 * x[50:]))
    first, second = (gemm.hopper_medium_linear(each, weight) for each in (x, y))
    assert torch.equal(first[:50], second[:50])
    assert torch.equal(first, gemm.hopper_medium_linear(x, weight))
