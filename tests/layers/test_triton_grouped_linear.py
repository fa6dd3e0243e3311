"""Products with packed weights against plain torch; weights that are packed mean what they did."""

from collections.abc import Mapping

import pytest
import torch
from chosen_products import product_name
from grouped_cases import both_ways, options_of, packed, random_blocks
from triton_layer_cases import (
    PLACES,
    assert_as_good_as_torch,
    ignores_overflow,
    poisoned_memory,
    random,
)

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import PackedWeight, packed_group
from octavo.gemm.portable.packed.packed_tiling import (
    MediumTiling,
    few_tiling_for,
    medium_tiling_for,
)

pytestmark = ignores_overflow
FORMS = [(4, 32), (4, 64), (4, 128), (4, 96), (8, 16), (8, 32), (8, 384)]
# Activations are of 16 bits.
places = pytest.mark.parametrize(
    ("device", "dtype"), [place for place in PLACES if place.values[1] != torch.float32]
)
TILING = MediumTiling(16, 16, 1, 2)


@pytest.mark.compiled
@pytest.mark.parametrize(("bits", "group"), [*FORMS, (4, 384)])
@pytest.mark.parametrize("size", [384, 768])
@pytest.mark.parametrize("mins", [False, True])
def test_packing_changes_no_weight(bits: int, group: int, size: int, mins: bool) -> None:
    weight = random_blocks(37, size, bits=bits, group=group, mins=mins)
    got = packed(weight, "cpu")
    assert got.shape == weight.shape
    torch.testing.assert_close(got.dequantise(), weight.dequantise(), rtol=0, atol=0)


@pytest.mark.compiled
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scales_beyond_float16_keep_their_digits(scale: float) -> None:
    weight = random_blocks(8, 256)
    assert weight.mins is not None
    scales, mins = weight.scales.float() * scale, weight.mins.float() * scale
    huge = type(weight)(4, weight.quants, scales, mins)
    largest = huge.dequantise().abs().max().item()
    torch.testing.assert_close(
        packed(huge, "cpu").dequantise(), huge.dequantise(), rtol=0, atol=largest * 1e-3
    )


@pytest.mark.compiled
def test_groups_that_cannot_be_packed() -> None:
    assert [packed_group(4, group) for group in (32, 96, 128, 4096, 16, 48)] == [32, 32, 128, 256, None, None]
    assert [packed_group(8, group) for group in (16, 48, 128, 4096, 8)] == [16, 16, 128, 128, None]


@pytest.mark.compiled
def test_numbers_of_rows_choose_the_product() -> None:
    weight = packed(random_blocks(64, 256, group=64), "cpu")
    assert [product_name(rows, weight) for rows in (1, 16)] == ["few", "few"]
    assert product_name(17, weight) == "medium"
    assert product_name(8192, weight) == "dequantised"
    for rows, weight_rows in ((1, 64), (17, 4096), (300, 24576)):
        tiling = medium_tiling_for(rows, weight_rows, 227 * 1024)
        assert all(value & value - 1 == 0 for value in (tiling.rows, tiling.columns, tiling.num_splits))


@places
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_product(device: str, dtype: torch.dtype, bits: int, group: int) -> None:
    weight = packed(random_blocks(37, 384, bits=bits, group=group), device)
    # Rows of a wider tensor.
    x = random(5, 387, device=device, dtype=dtype)[:, :384]
    from octavo.gemm.portable.packed.medium import medium_linear

    with poisoned_memory():
        got = medium_linear(x, weight, tiling=TILING)
    assert_as_good_as_torch(got, *both_ways(x, weight))


@places
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("names", [["gelu", "bias"], ["residual", "bias"]])
def test_what_is_fused(device: str, dtype: torch.dtype, names: list[str], num_splits: int) -> None:
    from octavo.gemm.portable.packed.medium import medium_linear

    weight = packed(random_blocks(42, 576, group=64), device)
    x = random(18, 576, device=device, dtype=dtype)
    options = options_of(names, 18, 42, 576, device, dtype)
    plain, exact = both_ways(x, weight, **options)
    with poisoned_memory():
        got = medium_linear(x, weight, **options, tiling=MediumTiling(16, 32, 1, 2, num_splits))
    assert_as_good_as_torch(got, plain, exact)


@places
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_dequantised(device: str, dtype: torch.dtype, bits: int, group: int) -> None:
    from octavo.gemm.portable.packed.dequantise import dequantise

    weight = packed(random_blocks(37, 384, bits=bits, group=group), device)
    with poisoned_memory():
        got = dequantise(weight, torch.empty(0, device=device, dtype=dtype))
    torch.testing.assert_close(got, weight.dequantise().to(dtype))


@places
def test_what_does_not_fit_is_refused(device: str, dtype: torch.dtype) -> None:
    from octavo.gemm.portable.packed.medium import medium_linear

    weight = packed(random_blocks(32, 64), device)
    x = random(3, 64, device=device, dtype=dtype)
    with pytest.raises(InvalidArgumentError, match=r"x must be \[M, 64\]"):
        medium_linear(x[:, :32], weight)
    with pytest.raises(InvalidArgumentError, match="x must be float16 or bfloat16"):
        medium_linear(x.float(), weight)
    with pytest.raises(InvalidArgumentError, match=r"bias must be contiguous \[32\]"):
        medium_linear(x, weight, x[0])


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("bits", "rows", "in_registers"), [(4, 1, False), (4, 1, True), (4, 8, True), (8, 16, True)]
)
def test_the_kernel_of_few_rows_compiles_without_a_gpu(bits: int, rows: int, in_registers: bool) -> None:
    """Its operands pass from shared memory to registers in one piece, and stay there."""
    assembly = compiled_few(
        bits, 32, 512, rows, 16, 2, 2, 2, in_registers, rows == 1, True, "silu", False, True
    )["ptx"]
    assert "mma.sync" in assembly
    assert "cp.async" in assembly
    assert ".local" not in assembly


@pytest.mark.compiled
def test_parts_of_unequal_length_end_where_the_weight_does() -> None:
    """Trap: 12 spans in parts of 8: the second part has 4 more, which are beyond the weight."""

    def clamps(size: int, turns: int) -> int:
        form = (4, 128, size, 8, 16, 4, 3, turns, True, False, False, None, False, False)
        return compiled_few(*form)["ttgir"].count("arith.minsi")

    # Two turns of four warps are parts of 8 spans, three are a part of 12.
    assert clamps(12 * 256, 2) == clamps(13 * 256, 2) > clamps(16 * 256, 2)
    assert clamps(13 * 256, 3) > clamps(12 * 256, 3)


def compiled_few(*shape: object) -> Mapping[str, str]:
    """What the kernel of few rows is compiled to for a Hopper GPU; shape: its constants, see Shape."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from octavo.gemm.portable.packed.packed_result import Result
    from octavo.gemm.portable.packed.rows_kernel import Shape, few_linear_kernel

    constants = Shape(*map(gl.constexpr, shape))
    names = [parameter.name for parameter in few_linear_kernel.params]
    kinds = dict.fromkeys(names, "i32") | {"x_ptr": "*bf16", "norm_weight_ptr": "*bf16", "eps": "fp32"}
    kinds |= {"words_ptr": "*i32", "pairs_ptr": "*i32", "shape": "constexpr"}
    kinds["result"] = Result("*bf16", "i32", "i32", "*bf16", "fp32")
    source = GluonASTSource(
        few_linear_kernel,
        signature=kinds,
        constexprs={(names.index("shape"),): constants},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if "ptr" in name},
    )
    options = {"num_warps": constants.warps.value}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@pytest.mark.compiled
@pytest.mark.parametrize("size", [64, 576, 4096, 12288])
@pytest.mark.parametrize("group", [16, 32, 128, 256])
def test_tilings_of_few_rows(size: int, group: int) -> None:
    """A single row is not cut; what a warp keeps of more rows fits into its registers."""
    assert few_tiling_for(1, size, group, 9).num_splits == 1
    for rows in (2, 8, 9, 16):
        tiling = few_tiling_for(rows, size, group, 9)
        columns = -(-size // tiling.num_splits // tiling.num_warps)
        assert columns * (8 if rows <= 8 else 16) <= 1024 * 8


def test_it_is_a_weight_of_its_own() -> None:
    """Words take half a byte a number; scales and minimums four bytes a group."""
    weight = packed(random_blocks(64, 512, group=128), "cpu")
    assert isinstance(weight, PackedWeight)
    assert weight.nbytes == 64 * 512 * (0.5 + 4 / 128)
