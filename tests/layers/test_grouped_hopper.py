"""The product of packed weights for Hopper GPUs, on a CPU: what tensor cores get, and that it compiles."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled_figures import compiled_figures
from grouped_cases import packed, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.forms.packed import MOST_GROUPS, TILE, PackedWeight
from octavo.gemm.hopper.packed import packed_gemm_tiling as hopper_tiling
from octavo.gemm.hopper.packed.packed_gemm_tiling import (
    ATOM,
    ATOMS,
    HopperMediumTiling,
    hopper_medium_tiling_for,
    unsupported_reason,
)

pytestmark = pytest.mark.compiled
# Of a program, but for the system's.
SHARED_BYTES = 227 * 1024
NUM_MULTIPROCESSORS = 132


def shared_bytes(tiling: HopperMediumTiling, group: int) -> int:
    """Bytes of rows, and of words and pairs of a span of 256 columns."""
    rows = 2 * 64 * tiling.atoms * tiling.rows * tiling.blocks * tiling.row_stages
    return rows + 4 * TILE * (32 + 256 // group) * tiling.word_stages


@pytest.mark.parametrize("num_rows", [17, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("num_weight_rows", [16, 1024, 6144, 24576])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tilings_fit(num_rows: int, num_weight_rows: int, group: int) -> None:
    tiling = hopper_medium_tiling_for(num_rows, num_weight_rows, 4096, group, NUM_MULTIPROCESSORS)
    assert MOST_GROUPS * tiling.rows * tiling.blocks >= num_rows
    spans = tiling.row_stages * tiling.atoms / ATOMS
    assert spans == int(spans)
    assert tiling.row_stages >= 2
    assert tiling.word_stages >= max(2, spans)
    assert shared_bytes(tiling, group) * tiling.per_sm <= SHARED_BYTES - 1024
    # Else the programs of a second kernel find no registers.
    assert tiling.max_registers * 32 * 12 * tiling.per_sm <= 65536


def test_two_programs_share_an_sm_where_a_weight_has_many_spans() -> None:
    """Elsewhere one fills it: were there room for another, some SMs would have two, others none."""
    for num_weight_rows, per_sm in ((24576, 2), (6144, 1)):
        tiling = hopper_medium_tiling_for(17, num_weight_rows, 4096, 128, NUM_MULTIPROCESSORS)
        assert (tiling.programs, tiling.per_sm) == (per_sm * NUM_MULTIPROCESSORS, per_sm)
        assert shared_bytes(tiling, 128) * (per_sm + 1) > SHARED_BYTES


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU pass for tensors on a Hopper GPU."""
    monkeypatch.setattr(hopper_tiling, "nvidia_generation", lambda device: 9)


def weight_of(num_rows: int, size: int, **options) -> PackedWeight:
    return packed(random_blocks(num_rows, size, **options), "cpu")


def test_what_the_kernel_can_multiply(on_hopper: None) -> None:
    x = torch.zeros(40, 256, dtype=torch.bfloat16)
    for group in (32, 64, 128, 256):
        assert unsupported_reason(x, weight_of(48, 256, group=group), is_gated=True) is None
    assert unsupported_reason(x, weight_of(36, 256), is_gated=False) is None
    assert "multiple of 4 rows" in str(unsupported_reason(x, weight_of(37, 256), is_gated=False))
    assert "multiple of 8 rows" in str(unsupported_reason(x, weight_of(40, 256), is_gated=True))
    assert "4 bits" in str(unsupported_reason(x, weight_of(48, 256, bits=8, group=32), is_gated=False))
    many = torch.zeros(257, 256, dtype=torch.bfloat16)
    assert "at most 256 rows" in str(unsupported_reason(many, weight_of(48, 256), is_gated=False))
    odd = torch.zeros(40, 260, dtype=torch.bfloat16)[:, :256]
    assert "16 bytes" in str(unsupported_reason(odd, weight_of(48, 256), is_gated=False))
    assert "16 bytes" in str(unsupported_reason(x[:, 4:], weight_of(48, 256), is_gated=False))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("size", "group"), [(256, 256), (256, 32), (320, 64), (1024, 128)])
def test_tma_can_read_words_and_pairs(size: int, group: int, is_gated: bool) -> None:
    """Also of a single group: descriptors check strides."""
    from octavo.gemm.hopper.packed.packed_gemm import _pairs, _words

    weight = weight_of(48, size, group=group)
    words, pairs = _words(weight.words, is_gated=is_gated), _pairs(weight, is_gated=is_gated)
    assert words.shape[-1] == weight.words.shape[1]
    assert pairs.shape[0] == len(weight.pairs)


def test_a_cpu_does_not_use_it() -> None:
    reason = unsupported_reason(torch.zeros(40, 256), weight_of(48, 256), is_gated=False)
    assert reason == "it needs a Hopper GPU (compute capability 9.0), got a weight on cpu"


def test_arguments_that_do_not_fit(on_hopper: None) -> None:
    from octavo.gemm.hopper.packed.packed_gemm import hopper_medium_linear

    x, weight = torch.zeros(40, 256, dtype=torch.bfloat16), weight_of(48, 256)
    with pytest.raises(InvalidArgumentError, match="x must be float16 or bfloat16"):
        hopper_medium_linear(x.float(), weight)
    with pytest.raises(InvalidArgumentError, match="multiple of 8 rows"):
        hopper_medium_linear(x, weight_of(40, 256), activation="silu")
    with pytest.raises(InvalidArgumentError, match="bias must be"):
        hopper_medium_linear(x, weight, torch.zeros(16, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="half of 129 rows"):
        hopper_medium_linear(x.new_zeros(129, 256), weight, tiling=HopperMediumTiling(64, 1, 4, 2, 2, 8))


def shares_of(
    num_spans: int, num_units: int, num_programs: int
) -> Iterator[tuple[int, list[int], list[tuple[int, int, int]]]]:
    """Of each program: its number, units in turn, and of its stripes the first unit, end and first program.

    The kernel's own functions, given Python's integers.
    """
    from octavo.gemm.hopper.packed import split_k as parts
    from octavo.gemm.hopper.packed.split_k import Work

    work = Work(0, 0, num_spans, num_units, 1)
    numbers = SimpleNamespace(maximum=max, minimum=min, where=lambda chosen, yes, no: yes if chosen else no)
    numbers.num_programs = lambda axis: num_programs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "gl", numbers)
        patch.setattr(parts, "units_of", parts.units_of.fn)
        for program in range(num_programs):
            numbers.program_id = lambda axis, program=program: program
            share = parts.own_share.fn(work)
            turns = [parts.unit_at.fn(turn, share, work) for turn in range(share.end - share.first)]
            stripes = range(share.tail, share.head - 1, -1)
            yield (
                program,
                turns,
                [
                    (*parts.units_of(stripe, share, work), parts.first_program.fn(stripe, work))
                    for stripe in stripes
                ],
            )


@settings(max_examples=200)
@given(num_spans=st.integers(1, 50), num_stripes=st.integers(1, 60), num_programs=st.integers(1, 300))
def test_programs_share_all_units(num_spans: int, num_stripes: int, num_programs: int) -> None:
    """All have as many, the TMA warp's order is that of the others, and parts are awaited that are stored."""
    num_units = num_stripes * num_spans
    num_programs = min(num_programs, num_units)
    seen: list[int] = []
    left, awaited = [0] * num_stripes, [0] * num_stripes
    for program, turns, stripes in shares_of(num_spans, num_units, num_programs):
        assert num_units // num_programs <= len(turns) <= -(-num_units // num_programs)
        assert turns == [unit for first, end, _ in stripes for unit in range(first, end)]
        seen += turns
        for first, end, first_program in stripes:
            stripe = first // num_spans
            if end == (stripe + 1) * num_spans:
                awaited[stripe] = program - first_program
            else:
                left[stripe] += 1
    assert sorted(seen) == list(range(num_units))
    assert left == awaited


# Half a span; too few words; words, or rows, of a span that is still being read.
@pytest.mark.parametrize("stages", [(2, 3, 8), (2, 6, 2), (4, 2, 1), (4, 1, 2)])
def test_buffers_that_do_not_suffice(stages: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="a tiling needs 2 row_stages"):
        HopperMediumTiling(64, 1, *stages, programs=8)


@pytest.mark.parametrize(("atoms", "programs"), [(3, 8), (1, 8), (8, 8), (4, 0)])
def test_tilings_that_do_not_exist(atoms: int, programs: int) -> None:
    with pytest.raises(InvalidArgumentError, match="a tiling needs 2 or 4 atoms and programs"):
        HopperMediumTiling(64, 1, atoms, 4, 4, programs)


def halves_of(register: Tensor, dtype: torch.dtype) -> Tensor:
    """Registers [...] as two numbers of 16 bits each [..., 2]."""
    return register.to(torch.int32).unsqueeze(-1).view(dtype)


def run_asm(asm: str, operands: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Do what PTX of one result says to registers of 32 bits, kept as int64; fused sums are rounded once."""
    values = dict(operands)

    def value(name: str) -> Tensor:
        return torch.tensor(int(name, 0)) if name[0].isdigit() else values[name]

    lines = re.findall(r"^(?:\{.*|)\s*([a-z][\w.]*) ([^;{]*);", asm, re.MULTILINE)
    for name, arguments in lines:
        out, *given = arguments.replace(" ", "").split(",")
        a, *others = (value(each) for each in given)
        if name == "shr.u32":
            values[out] = a >> others[0]
        elif name == "lop3.b32":
            assert others[2] == 0xEA
            values[out] = a & others[0] | others[1]
        elif name == "mov.b32":
            values[out] = a
        else:
            kind = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
            floats = [halves_of(each, dtype).double() for each in (a, *others)]
            assert name in (f"add.rn.{kind}", f"fma.rn.{kind}")
            result = floats[0] + floats[1] if name[0] == "a" else floats[0] * floats[1] + floats[2]
            values[out] = result.to(dtype).view(torch.int32)[..., 0].long() & 0xFFFFFFFF
    return values["$0"]


def places_of_registers(num_columns: int) -> Tensor:
    """[8 warps, 32 lanes, registers, 2]: rows and columns of wgmma's first operand as Gluon lays it out."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.experimental.gluon import language as gl

    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    operand = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]), 2)
    layout = builder.to_linear_layout(operand._to_ir(builder), [TILE, num_columns])
    bases = [layout.warp_bases, layout.lane_bases, layout.reg_bases]
    places = torch.zeros(1, 2, dtype=torch.int64)
    for base in [base for each in bases for base in reversed(each)]:
        places = torch.stack((places, places ^ torch.tensor(base)), 1).flatten(0, 1)
    return places.view(8, 32, -1, 2)


def place_in_wgmma(
    warp: Tensor, lane: Tensor, step: Tensor, register: Tensor, i: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows and columns of a register's number i, as PTX's manual says of wgmma's 64 x 16 operand."""
    row = 16 * warp + lane // 4 + 8 * (register % 2)
    return row, 16 * step + 2 * (lane % 4) + 8 * (register // 2) + i


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 256])
def test_every_lane_has_the_weights_that_tensor_cores_take_from_it(dtype: torch.dtype, group: int) -> None:
    """From the words that a lane reads, by the kernel's own PTX, to the operands of all steps of a span."""
    from octavo.gemm.hopper.unpack_operands import scale_asm

    weight = weight_of(TILE, 256, group=group)
    row, word = places_of_registers(32).unbind(-1)
    words = weight.words[row, word].long()
    both = (
        weight.pairs.T.clone(memory_format=torch.contiguous_format)
        .view(torch.float16)
        .view(TILE, -1, 2)
        .float()
    )
    scales, mins = both.unbind(-1)
    if dtype == torch.bfloat16:
        mins = mins + 8 * scales
    got = torch.zeros(TILE, 256, dtype=dtype)
    for plane in range(8):
        bits = (words >> 16 * (plane // 4) & 0xFFFF).view(8, 32, -1, 2)
        first_row = row.view(8, 32, -1, 2)[..., 0]
        scale, low = (
            (number[:, 32 * plane // group].to(dtype).view(torch.int16).long() & 0xFFFF)[first_row] * 0x10001
            for number in (scales, mins)
        )
        operands = {"$1": bits[..., 0] | bits[..., 1] << 16, "$2": scale, "$4": low}
        registers = halves_of(run_asm(scale_asm(plane % 4, dtype == torch.bfloat16), operands, dtype), dtype)
        at, column = place_in_wgmma(*torch.meshgrid(*map(torch.arange, (8, 32, 2, 4, 2)), indexing="ij"))
        got[at, 32 * plane + column] = registers.view(at.shape)
    exact = weight.dequantise() / weight.factor
    # One rounding, or those of the scale, of the minimum and of the weight.
    unit = torch.finfo(dtype).eps / 2
    scale = scales.repeat_interleave(group, 1)
    low = mins.repeat_interleave(group, 1).abs()
    bound = unit * exact.abs() if dtype == torch.float16 else unit * (exact.abs() + 8 * scale + low) * 1.01
    assert ((got.float() - exact).abs() <= bound).all()


def test_planes_side_by_side_are_an_atom() -> None:
    """Joining two planes moves nothing between lanes: a lane's registers of an atom are theirs in turn."""
    plane, atom = places_of_registers(32), places_of_registers(ATOM)
    right = plane + torch.tensor([0, 32])
    assert torch.equal(torch.cat((plane, right), 2), atom)


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    """Facts about the kernel as compiled for a Hopper GPU, by case."""
    return compiled_figures(Path(__file__).with_name("compile_grouped_hopper.py"))


def test_the_kernel_fits_a_hopper_gpu_and_its_wgmmas_run_on(figures: dict[str, dict[str, int]]) -> None:
    """Where registers do not suffice, the assembler lets every wgmma wait for the one before."""
    blocks = {"3 times 32 rows": 3}
    assert len(figures) == 5
    for name, facts in figures.items():
        assert facts["stack"] == facts["spills"] == 0, name
        assert facts["shared"] <= SHARED_BYTES, name
        # Four steps of 16 columns in an atom; four atoms in a span.
        chains = 4 * blocks.get(name, 1)
        assert (facts["wgmmas"], facts["chains"]) == (4 * chains, chains), name
