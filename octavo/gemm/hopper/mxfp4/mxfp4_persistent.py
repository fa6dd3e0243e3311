"""The persistent grouped GEMM of experts in MXFP4 for Hopper GPUs: 4 bits become operands in registers.

    TMA warp (_fetch)                    two warpgroups (_multiply)

    wait for the kernel before           wait for the kernel before
    for each tile:                       for each tile:
      for each span of 128 columns:        for each span:
        wait free[stage]                     wait filled[stage]
        words, rows of x --> stage           words --> registers
                                             for each atom of 64 columns:
                                               bits --> bfloat16, scaled
                                               wgmma: sums += weights x rows
                                               the wgmma before is done; its stage, once read, is free
                                           epilogue, store

A tile is 128 rows of an expert's weight and a block of the rows of x that chose it; the list of tiles is made
on the device (sorted_rows). Programs are persistent, one or two per SM, and take tiles in turn: words of the
next tile arrive while results are stored.

Results are computed transposed, [weight rows, rows of x]: tensor cores take their first operand from
registers, so a weight never touches shared memory once it is a float. It is unpacked while the one before it
is multiplied (unpack_operands).

Shared memory of a stage:

    rows     2 atoms | rows of x | 64 columns
    words    128 rows of the weight | 16 words; with an activation 8 rows of gate and 8 of up by turns

Imported only where Triton runs.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.hopper.gemv_tiles import ceil_div
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import ATOM, SPAN, TILE, Mxfp4ManyTiling, unsupported_reason
from octavo.gemm.hopper.transposed_epilogue import finish_experts, weight_rows
from octavo.gemm.hopper.unpack_operands import unpack_mxfp4
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps
from octavo.kernels.padded_rows import new_rows, readable_rows
from octavo.kernels.ring import claim_stage, free_stage, make_ring, wait_for_stage

# Two warpgroups multiply.
NUM_WARPS = 8
_ATOM = gl.constexpr(ATOM)
_SPAN = gl.constexpr(SPAN)
_TILE = gl.constexpr(TILE)
_WORDS = gl.constexpr(SPAN // 8)


class Shape(NamedTuple):
    """Constants of the kernel.

    Attributes:
        size: K.
        rows: rows of x in a tile.
        stages: spans in shared memory.
        activation: gate and up's, None for down.
    """

    size: Any
    rows: Any
    stages: Any
    activation: Any


class Operands(NamedTuple):
    """Pointers beside x and words.

    Attributes:
        exponents: [E, spans, N] int32.
        bias: [E, N], or None.
        tiles: tiles of rows, see sorted_rows.
        pairs: for down, [P] int32: where a sorted row's result belongs.
    """

    exponents: Any
    bias: Any
    tiles: Any
    pairs: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory, one or two for each stage, and their ring."""

    rows: Any
    words: Any
    ring: Any


def expert_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    tiles: Tensor,
    tiling: Mxfp4ManyTiling,
    *,
    activation: str | None = None,
    pairs: Tensor | None = None,
) -> Tensor:
    """Multiply sorted rows with the weight of their expert; sums are float32.

    Args:
        x: [P, K] bfloat16, contiguous, in the order of experts.
        weight: [E, N, K], see mxfp4_rows_tiling.unsupported_reason; with an activation [gate | up] along N.
        tiles: tiles of x, see sorted_rows.sort_rows.
        tiling: its `rows` is the height of the tiles.
        activation: gate and up's, a name of kernels.activation; None for down.
        pairs: [P] int32, where each row's result belongs; None: where x is.

    Returns:
        A new [P, N], or [P, N / 2] with an activation, dtype of x; rows of no tile are not set.

    Raises:
        InvalidArgumentError: unsupported_reason gives one.
    """
    reason = unsupported_reason(x, weight)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMM of experts cannot run: {reason}")
    _, num_weight_rows, size = weight.shape
    words = weight.words.flatten(0, 1)
    if activation is None:
        num_columns, box = num_weight_rows, [1, TILE, 16]
    else:
        num_columns, box = num_weight_rows // 2, [1, TILE // 16, 2, 8, 16]
        words = words.unflatten(1, (2, -1, 8)).transpose(1, 2)
    out = new_rows(x, len(x), num_columns)
    shape = Shape(size=size, rows=tiling.rows, stages=tiling.stages, activation=activation)
    launch(
        mxfp4_persistent_kernel,
        (tiling.programs * num_multiprocessors(x.device),),
        x_matrix=_describe_rows(x, tiling.rows),
        words_matrix=describe_matrix(words, box, swizzle_bytes=64),
        operands=Operands(exponents=weight.exponents, bias=weight.bias, tiles=tiles, pairs=pairs),
        out=out,
        num_columns=num_columns,
        shape=constants(shape),
        num_warps=NUM_WARPS,
        maxnreg=tiling.registers,
        launch_pdl=overlaps(x),
    )
    return out


def _describe_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe x [P, K] as [K / 64, P, 64], of which a copy has two: a span of `rows` rows."""
    readable = x.as_strided((readable_rows(x, rows), x.shape[1]), x.stride(), x.storage_offset())
    return describe_matrix(readable.unflatten(1, (-1, ATOM)).transpose(0, 1), [2, rows, ATOM])


@gluon.jit
def mxfp4_persistent_kernel(x_matrix, words_matrix, operands, out, num_columns, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        x_matrix: sorted rows of x as TMA sees them, [K / 64, P, 64].
        words_matrix: the weight's words, [E spans, N, 16], or of gate and up [E spans, n / 8, 2, 8, 16].
        operands: see there.
        out: of gate and up [P, n], sorted rows; of down [P, N], rows of pairs.
        num_columns: n or N.
        shape: see there.
    """
    gdc_launch_dependents()
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    pipe = _Pipe(
        gl.allocate_shared_memory(x_matrix.dtype, [shape.stages, 2, shape.rows, _ATOM], x_matrix.layout),
        gl.allocate_shared_memory(gl.int32, [shape.stages, _TILE, _WORDS], WORDS),
        make_ring(shape.stages),
    )
    gl.warp_specialize(
        [
            (_multiply, (pipe, operands, out, num_columns, shape)),
            (_fetch, (x_matrix, words_matrix, pipe, operands, num_columns, shape)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _num_tiles(operands, num_columns, shape):
    """Return the number of tiles of an expert's columns, and of all tiles."""
    COLUMNS: gl.constexpr = _TILE if shape.activation is None else _TILE // 2
    across = (num_columns + COLUMNS - 1) // COLUMNS
    return across, gl.load(operands.tiles) * across


@gluon.jit
def _rows_of(operands, tile):
    """Return a tile's expert, its first row of x and the end of the expert's rows."""
    at = operands.tiles + 4 + tile * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _fetch(x_matrix, words_matrix, pipe, operands, num_columns, shape):
    """Fetch all spans of all tiles; what lies past the end of K reads as zero."""
    SPANS: gl.constexpr = ceil_div(shape.size, _SPAN)
    NUM_BYTES: gl.constexpr = x_matrix.block_type.nbytes + words_matrix.block_type.nbytes
    gdc_wait()
    across, last = _num_tiles(operands, num_columns, shape)
    step = 0
    for tile in range(gl.program_id(0), last, gl.num_programs(0)):
        expert, first, _ = _rows_of(operands, tile // across)
        for span in range(SPANS):
            stage, filled = claim_stage(pipe.ring, step, NUM_BYTES, shape.stages, PACED=False)
            words = pipe.words.index(stage)
            words = words._reinterpret(gl.int32, words_matrix.block_shape, words_matrix.layout)
            if shape.activation is None:
                place = [expert * SPANS + span, tile % across * _TILE, 0]
            else:
                place = [expert * SPANS + span, tile % across * (_TILE // 16), 0, 0, 0]
            tma.async_copy_global_to_shared(words_matrix, place, filled, words)
            tma.async_copy_global_to_shared(x_matrix, [2 * span, first, 0], filled, pipe.rows.index(stage))
            step += 1


@gluon.jit
def _multiply(pipe, operands, out, num_columns, shape):
    """Multiply all tiles, apply the epilogue, store the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, shape.rows, 16])
    gdc_wait()
    across, last = _num_tiles(operands, num_columns, shape)
    step = 0
    for tile in range(gl.program_id(0), last, gl.num_programs(0)):
        expert, first, end = _rows_of(operands, tile // across)
        column = tile % across
        sums = _sum_spans(pipe, step, operands, expert, column, num_columns, shape, SUMS)
        finish_experts(sums, operands, out, expert, first, end, column, num_columns, shape, SUMS)
        step += ceil_div(shape.size, _SPAN)


@gluon.jit
def _read_units(pipe, stage, A: gl.constexpr):
    """Return the words of a span as units of 16 bits, [128, 32] as tensor cores take a left operand."""
    UNITS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return pipe.words.index(stage)._reinterpret(gl.int16, [_TILE, 2 * _WORDS], UNITS).load(A)


@gluon.jit
def _sum_spans(pipe, step, operands, expert, tile, num_columns, shape, SUMS: gl.constexpr):
    """Return weights x rows, [128, rows] float32."""
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SPANS: gl.constexpr = ceil_div(shape.size, _SPAN)
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row = weight_rows(tile, gl.arange(0, _TILE, gl.SliceLayout(1, A)), num_columns, shape)
    exponents_at = operands.exponents + expert.to(gl.int64) * SPANS * num_columns * HALVES + row
    exponents = gl.load(exponents_at)
    sums = gl.zeros([_TILE, shape.rows], gl.float32, SUMS)
    # Tensor cores still read this operand while the next one is unpacked.
    before = gl.zeros([_TILE, _ATOM], gl.bfloat16, A)
    stage = wait_for_stage(pipe.ring, step, shape.stages)
    units = _read_units(pipe, stage, A)
    for span in range(SPANS):
        rows = pipe.rows.index(stage)._reinterpret(pipe.rows.dtype, [2, shape.rows, _ATOM], ROWS)
        now = exponents
        exponents_at += gl.where(span + 1 < SPANS, num_columns * HALVES, 0)
        exponents = gl.load(exponents_at)
        weights = unpack_mxfp4(units, now, 0, A)
        sums = warpgroup_mma(weights, rows.index(0).permute((1, 0)), sums, is_async=True)
        sums, before = warpgroup_mma_wait(1, deps=(sums, before))
        done = gl.where(stage > 0, stage - 1, shape.stages - 1)
        mbarrier.arrive(pipe.ring.free.index(done), count=1, pred=span > 0)
        before = weights
        weights = unpack_mxfp4(units, now, 1, A)
        # The words of the next span are read while this one is multiplied.
        step += gl.where(span + 1 < SPANS, 1, 0)
        stage = gl.where(span + 1 < SPANS, gl.where(stage + 1 < shape.stages, stage + 1, 0), stage)
        mbarrier.wait(pipe.ring.filled.index(stage), (step // shape.stages) & 1)
        units = _read_units(pipe, stage, A)
        sums = warpgroup_mma(weights, rows.index(1).permute((1, 0)), sums, is_async=True)
        sums, before = warpgroup_mma_wait(1, deps=(sums, before))
        before = weights
    sums, before = warpgroup_mma_wait(0, deps=(sums, before))
    free_stage(pipe.ring, stage)
    return sums
