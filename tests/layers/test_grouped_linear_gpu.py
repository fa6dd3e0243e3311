"""Products with packed weights on an NVIDIA GPU: shapes of decoders, all epilogues, all numbers of rows."""

from dataclasses import replace

import pytest
import torch
from grouped_cases import both_ways, options_of, packed, random_blocks
from triton_layer_cases import EPS, HAS_GPU, assert_as_good_as_torch, poisoned_memory, random

from octavo.errors import InvalidArgumentError
from octavo.gemm.make_linear import make_quantised_linear
from octavo.gemm.portable.packed.packed_tiling import FewTiling, MediumTiling
from octavo.kernels import launch as triton_launch
from octavo.layers import RMSNorm
from octavo.layers.block import BlockInput, BlockOutput
from octavo.parallel import TensorParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
DTYPES = [torch.bfloat16, torch.float16]
FORMS = [(4, 32), (4, 64), (4, 128), (4, 4096), (8, 16), (8, 32)]
FUSED = [[], ["bias"], ["silu"], ["gelu", "bias"], ["residual"], ["residual", "bias"]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 16])
def test_few_rows(dtype: torch.dtype, bits: int, group: int, num_rows: int) -> None:
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    weight = packed(random_blocks(6144, 4096, bits=bits, group=group), "cuda")
    x = random(num_rows, 4096, device="cuda", dtype=dtype)
    with poisoned_memory():
        got = few_linear(x, weight)
    assert_as_good_as_torch(got, *both_ways(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [*FUSED, ["norm"], ["norm", "silu"], ["norm", "bias", "gelu_tanh"]])
@pytest.mark.parametrize("shape", [(576, 576), (1030, 320), (4096, 12288)])
@pytest.mark.parametrize("num_rows", [1, 5, 13])
def test_what_few_rows_fuse(
    dtype: torch.dtype, names: list[str], shape: tuple[int, int], num_rows: int
) -> None:
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    if num_rows > 1:
        names = [name for name in names if name != "norm"]
    weight = packed(random_blocks(*shape, group=32), "cuda")
    x = random(num_rows, shape[1], device="cuda", dtype=dtype)
    options = options_of(names, num_rows, *shape, "cuda", dtype)
    plain, exact = both_ways(x, weight, **options)
    with poisoned_memory():
        got = few_linear(x, weight, **options, eps=EPS)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("num_warps", [2, 4, 8])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_row_in_any_tiling(
    columns: int,
    num_warps: int,
    num_stages: int,
    in_registers: bool,
    overlaps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    monkeypatch.setattr(triton_launch, "OVERLAP", overlaps)
    tiling = FewTiling(columns, num_warps, num_stages, 2, in_registers=in_registers)
    weight = packed(random_blocks(2 * 1000, 1280, group=128), "cuda")
    x = random(1, 1280, device="cuda", dtype=torch.bfloat16)
    options = options_of(["norm", "silu"], 1, 2000, 1280, "cuda", torch.bfloat16)
    got = few_linear(x, weight, **options, eps=EPS, tiling=tiling)
    assert_as_good_as_torch(got, *both_ways(x, weight, **options))


@pytest.mark.parametrize("num_rows", [2, 8, 9, 16])
@pytest.mark.parametrize("columns", [16, 32])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("names", [["residual", "bias"], ["silu", "bias"]])
def test_parts_and_tiles_of_few_rows(
    num_rows: int, columns: int, num_splits: int, programs: int, names: list[str]
) -> None:
    """Programs with many tiles and with a part of one; parts of K that are not equal."""
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    weight = packed(random_blocks(20002, 1280, group=64), "cuda")
    x = random(num_rows, 1280, device="cuda", dtype=torch.float16)
    options = options_of(names, num_rows, 20002, 1280, "cuda", torch.float16)
    plain, exact = both_ways(x, weight, **options)
    tiling = FewTiling(columns, 4, 3, programs, num_splits)
    with poisoned_memory():
        got = few_linear(x, weight, **options, tiling=tiling)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("num_rows", [2, 8, 9, 16])
@pytest.mark.parametrize(
    ("form", "tiling"),
    [((4, 128, 3072), FewTiling(16, 4, 3, 1, 2)), ((4, 128, 14336), None), ((8, 128, 5120), None)],
)
def test_nothing_beyond_the_weight_is_read(
    num_rows: int, form: tuple[int, int, int], tiling: FewTiling | None
) -> None:
    """Parts of whole turns that are longer than the weight; pairs of NaN and words lie behind it."""
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    bits, group, size = form
    weight = packed(random_blocks(512, size, bits=bits, group=group), "cuda")
    followed = replace(
        weight, words=followed_by(weight.words, -1), pairs=followed_by(weight.pairs, 0x7E007E00)
    )
    x = random(num_rows, size, device="cuda", dtype=torch.bfloat16)
    assert_as_good_as_torch(few_linear(x, followed, tiling=tiling), *both_ways(x, weight))


def followed_by(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """The same numbers, at the begin of memory that holds a value from there on."""
    memory = torch.full((2 * tensor.numel(),), value, dtype=tensor.dtype, device=tensor.device)
    return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("names", [[], ["silu"]])
def test_a_weight_of_fewer_rows_than_a_tile(num_rows: int, names: list[str]) -> None:
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    weight = packed(random_blocks(6, 64), "cuda")
    x = random(num_rows, 64, device="cuda", dtype=torch.bfloat16)
    options = options_of(names, num_rows, 6, 64, "cuda", torch.bfloat16)
    with poisoned_memory():
        got = few_linear(x, weight, **options)
    assert_as_good_as_torch(got, *both_ways(x, weight, **options))


def test_a_single_row_is_not_cut() -> None:
    from octavo.gemm.portable.packed.rows_gemm import few_linear

    weight = packed(random_blocks(32, 2048), "cuda")
    x = random(1, 2048, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="a single row is not cut"):
        few_linear(x, weight, tiling=FewTiling(16, 4, 3, 2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("num_rows", [1, 17, 64, 100, 256, 300])
def test_medium_rows(dtype: torch.dtype, bits: int, group: int, num_rows: int) -> None:
    from octavo.gemm.portable.packed.medium import medium_linear

    weight = packed(random_blocks(1536, 4096, bits=bits, group=group), "cuda")
    x = random(num_rows, 4096, device="cuda", dtype=dtype)
    with poisoned_memory():
        got = medium_linear(x, weight)
    assert_as_good_as_torch(got, *both_ways(x, weight))


@pytest.mark.parametrize("names", FUSED)
@pytest.mark.parametrize("tiling", [None, MediumTiling(16, 64, 4, 4), MediumTiling(64, 128, 8, 3)])
def test_what_medium_rows_fuse(names: list[str], tiling: MediumTiling | None) -> None:
    from octavo.gemm.portable.packed.medium import medium_linear

    weight = packed(random_blocks(1030, 320, group=64), "cuda")
    x = random(37, 320, device="cuda", dtype=torch.bfloat16)
    options = options_of(names, 37, 1030, 320, "cuda", torch.bfloat16)
    plain, exact = both_ways(x, weight, **options)
    with poisoned_memory():
        got = medium_linear(x, weight, **options, tiling=tiling)
    assert_as_good_as_torch(got, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_dequantised(dtype: torch.dtype, bits: int, group: int) -> None:
    from octavo.gemm.portable.packed.dequantise import dequantise

    weight = packed(random_blocks(1000, 4096, bits=bits, group=group), "cuda")
    with poisoned_memory():
        got = dequantise(weight, torch.empty(0, device="cuda", dtype=dtype))
    torch.testing.assert_close(got, weight.dequantise().to(dtype))


@pytest.mark.parametrize("num_rows", [1, 4, 16, 17, 128, 256, 257, 1024])
@pytest.mark.parametrize("kind", ["one", "two forms", "ordered"])
def test_layers_of_a_block(num_rows: int, kind: str) -> None:
    """What a decoder calls: norm, gate and up, activation; then down, added to the stream."""
    weights = [random_blocks(1536, 1024, group=128, seed=seed) for seed in (5, 6)]
    down = random_blocks(1024, 1536, group=32, seed=7)
    order = torch.randperm(1024)
    if kind == "two forms":
        weights[1] = random_blocks(1536, 1024, bits=8, group=16, seed=6)
    if kind == "ordered":
        weights = [type(each)(each.bits, each.quants, each.scales, each.mins, order) for each in weights]
    floats = [each.dequantise().cuda() for each in (*weights, down)]
    norm = RMSNorm(random(1024, device="cuda", dtype=torch.bfloat16, seed=8), EPS)
    on_gpu = [[each.to(torch.device("cuda")) for each in group] for group in (weights, [down])]
    gate_up, out = (make_quantised_linear(group, dtype=torch.bfloat16) for group in on_gpu)
    into = BlockInput(norm, gate_up, "silu")
    back = BlockOutput(out, None, TensorParallel())
    hidden = random(num_rows, 1024, device="cuda", dtype=torch.bfloat16)

    def plain(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = hidden * torch.rsqrt(hidden.square().mean(-1, True) + EPS) * norm.weight.to(hidden.dtype)
        gate, up = (x @ gate_up.to(x.dtype).T).chunk(2, -1)
        return hidden + torch.nn.functional.silu(gate) * up @ down.to(x.dtype).T

    same = plain(hidden, torch.cat(floats[:2]), floats[2])
    exact = plain(hidden.double(), torch.cat(floats[:2]).double(), floats[2].double())
    delta = back(into(hidden, None), hidden)
    assert_as_good_as_torch(hidden if delta is None else hidden + delta, same, exact)
