"""Products with weights in blocks: the specification's numbers, for every form, any batch and other CPUs."""

import math

import pytest
import torch
from cpu_kinds import for_kinds_of_cpus  # noqa: F401

from octavo.forms.base import join_rows
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.gemm.cpu.block_linear import BlockLinear, TiledBlocks, tiled
from octavo.gemm.cpu.library import compile_failure

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")

# Bits, dtype of scales, scales of a block, minimums; or numbers of MXFP4.
FORMS: list[tuple] = [
    (4, torch.float16, 1, True),
    (4, torch.float32, 1, True),
    (4, torch.float16, 1, False),
    (8, torch.float16, 1, False),
    (8, torch.float16, 1, True),
    (8, torch.float32, 1, True),
    (8, torch.float32, 2, False),
    ("mxfp4",),
]


def mxfp4_weight(rows: int, columns: int, seed: int = 0) -> Mxfp4Weight:
    """Every number, exponents that float32 holds results of, and the two least ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    # The largest numbers together.
    values[0], values[-1] = 0x77, 0xFF
    exponents = torch.randint(100, 150, (rows, columns // BLOCK), generator=generator, dtype=torch.uint8)
    exponents[rows // 2] = torch.arange(columns // BLOCK) % 2
    return Mxfp4Weight(values, exponents)


def block_weight(form: tuple, rows: int, columns: int, seed: int = 0) -> BlockWeight | Mxfp4Weight:
    if form == ("mxfp4",):
        return mxfp4_weight(rows, columns, seed)
    bits, dtype, num_scales, has_mins = form
    generator = torch.Generator().manual_seed(seed)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    quants = torch.randint(low, high, (rows, columns), generator=generator, dtype=kind)
    # The largest numbers together, where sums of products come closest to overflow.
    quants[0], quants[-1] = high - 1, low
    shape = rows, columns // BLOCK * num_scales
    scales = torch.randn(shape, generator=generator).to(dtype)
    mins = torch.randn(shape, generator=generator).to(dtype) if has_mins else None
    return BlockWeight(bits, quants, scales, mins)


def eight_bit_rows(num_rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows that the kernel's 8 bits hold exactly: whole numbers to 127, times a scale for each block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-127, 128, (num_rows, columns // BLOCK, BLOCK), generator=generator).float()
    blocks[:, :, 5] = 127
    # An extreme row: all of the largest size.
    blocks[-1] = torch.where(blocks[-1] > 0, 127.0, -127.0)
    return (blocks * torch.randn(num_rows, columns // BLOCK, 1, generator=generator)).flatten(1)


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: BlockWeight | Mxfp4Weight) -> None:
    values = weight.dequantise().double()
    expected, size = x.double() @ values.T, x.double().abs() @ values.abs().T
    assert ((actual - expected).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("num_rows", "rows", "columns"), [(1, 8, 32), (3, 1, 64), (4, 19, 96), (9, 40, 512)])
def test_product(form: tuple, num_rows: int, rows: int, columns: int) -> None:
    weight, x = block_weight(form, rows, columns), eight_bit_rows(num_rows, columns)
    assert_close(BlockLinear(tiled([weight]))(x), x, weight)


def test_exponents_of_mxfp4_from_the_least_to_the_largest() -> None:
    """Rows of one exponent each, times what keeps the results where float32 has them."""
    exponents = torch.tensor([0, 1, 2, 3, 64, 127, 200, 253, 254], dtype=torch.uint8)
    weight = Mxfp4Weight(torch.full((9, 16), 0x21, dtype=torch.uint8), exponents[:, None])
    for factor in (2.0**100, 2.0**-100):
        x = eight_bit_rows(1, 32) * factor
        exact = x.double() @ weight.dequantise().double().T
        held = (exact.abs() < torch.finfo(torch.float32).max / 4) & (exact.abs() > 2.0**-120)
        got = BlockLinear(tiled([weight]))(x).double()
        assert held.sum() >= 4
        torch.testing.assert_close(got[held], exact[held], rtol=1e-6, atol=0)


def test_any_number_is_rounded_to_8_bits() -> None:
    """At most half a step of its block, whose steps are 127 to the largest number."""
    weight, x = block_weight(FORMS[0], 32, 96), torch.randn(6, 96)
    step = x.view(6, -1, BLOCK).abs().amax(-1, keepdim=True) / 127
    most = (step.expand(-1, -1, BLOCK).flatten(1).double() * 0.501) @ weight.dequantise().abs().double().T
    error = BlockLinear(tiled([weight]))(x) - x.double() @ weight.dequantise().double().T
    assert (error.abs() <= most).all()
    assert error.abs().max() > 0


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_bit_of_a_row_depends_on_the_others(form: tuple) -> None:
    layer = BlockLinear(tiled([block_weight(form, 24, 160)]))
    x = torch.randn(7, 160)
    together = layer(x)
    for row in range(7):
        assert torch.equal(layer(x[row : row + 1]), together[row : row + 1])
        assert torch.equal(layer(x[row:]), together[row:])


def test_threads_change_no_bit() -> None:
    layer, x = BlockLinear(tiled([block_weight(FORMS[0], 200, 64)])), torch.randn(5, 64)
    num_threads, expected = torch.get_num_threads(), layer(x)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(layer(x), expected)
    finally:
        torch.set_num_threads(num_threads)


def test_weights_above_one_another_and_a_bias() -> None:
    """Each writes its columns, whatever its form."""
    weights = [
        block_weight(form, 13, 64, seed)
        for seed, form in enumerate((*FORMS[:1] * 2, FORMS[6], FORMS[3], FORMS[7]))
    ]
    parts, bias, x = tiled(weights), torch.randn(65), eight_bit_rows(3, 64)
    out = BlockLinear(parts, bias)(x)
    for index, weight in enumerate(weights):
        columns = slice(13 * index, 13 * index + 13)
        assert_close(out[:, columns] - bias[columns], x, weight)


def test_rows_that_lie_apart_in_memory() -> None:
    weight = block_weight(FORMS[0], 16, 64)
    x = eight_bit_rows(4, 128)[:, 32:96]
    assert_close(BlockLinear(tiled([weight]))(x), x.contiguous(), weight)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none_and_stays_in_its_row(value: float) -> None:
    layer, x = BlockLinear(tiled([block_weight(FORMS[0], 16, 64)])), torch.randn(5, 64)
    clean = layer(x)
    x[2, 40] = value
    out = layer(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_zeros_and_no_rows() -> None:
    layer = BlockLinear(tiled([block_weight(FORMS[0], 16, 64)]), torch.arange(16.0))
    assert torch.equal(layer(torch.zeros(2, 64)), torch.arange(16.0).expand(2, 16))
    assert layer(torch.zeros(0, 64)).shape == (0, 16)


@pytest.mark.parametrize("form", FORMS[:-1], ids=str)
def test_rows_are_looked_up_exactly(form: tuple) -> None:
    weight = block_weight(form, 19, 96)
    tiles, ids = TiledBlocks(weight), torch.tensor([18, 0, 7, 8, 8, 3], dtype=torch.int32)
    assert torch.equal(tiles.rows(ids), weight.dequantise()[ids.long()])


def test_rows_that_are_added_are_zero() -> None:
    tiles = TiledBlocks(block_weight(FORMS[0], 10, 64), num_rows=21)
    assert tiles.shape == (21, 64)
    assert not tiles.rows(torch.arange(10, 21)).any()


def test_rows_can_be_taken_and_joined() -> None:
    first, second = block_weight(FORMS[0], 6, 64, 1), block_weight(FORMS[0], 5, 64, 2)
    (joined,) = join_rows([first, second])
    whole = torch.cat((first.dequantise(), second.dequantise()))
    assert torch.equal(joined.dequantise(), whole)
    order = torch.tensor([10, 0, 5, 6])
    assert torch.equal(joined.take(order).dequantise(), whole[order])
