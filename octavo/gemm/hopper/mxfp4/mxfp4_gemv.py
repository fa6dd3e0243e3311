"""The GEMV for Hopper GPUs with a single token's experts in MXFP4: the pipeline of float_gemv_kernel.

Tensor cores multiply 16 rows of weights with 8 columns. A step has twice as many rows (or once, if k is odd):

    gate and up    a tile is 16 columns of an expert: 16 rows of gate, and of up; x is repeated
    down           a tile is 8 columns of the sum: 8 rows of an expert and of the next, and of two more.
                   Columns 0 to 3 of a product have x of the one, columns 4 to 7 of the other, so half of
                   each product counts. 16 columns of each expert would leave a third of the programs idle

After the previous kernel a program first reads the choice of experts, then fetches their weights by TMA:

    stage, gate and up    words  gate and up | spans | 16 rows | 16 words     exponents  likewise
    stage, down           words  an expert each: spans | 8 rows | 16 words    exponents  likewise

A warp takes 0.1 us to issue a copy. Down has many small copies, so four warps issue them, an expert each.

Programs of gate and up take more than half of an SM, but leave room for one of down: two never share an SM
while another SM has none, whatever the previous kernel leaves free.

Imported only where Triton runs.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.errors import InvalidArgumentError
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.hopper.gemv_tiles import ceil_div, num_tiles, place_tile
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_operands import (
    BLOCKS,
    PRODUCT,
    SMALLER,
    finish,
    keep_rows,
    load_choice,
    load_epilogue,
    load_exponents,
    load_two_exponents,
    load_two_words,
    load_words,
    load_x,
    multiply_block,
)
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import (
    COLUMNS,
    REGISTERS,
    SPAN,
    WARPS,
    copy_boxes,
    mxfp4_gemv_tiling_for,
    unsupported_reason,
)
from octavo.kernels.descriptor import describe_matrix
from octavo.kernels.device import num_multiprocessors
from octavo.kernels.launch import constants, launch, overlaps
from octavo.kernels.ring import (
    claim_stage,
    free_stage,
    keep_pace,
    make_ring,
    wait_for_stage,
    wait_until_free,
)

_WARPS = gl.constexpr(WARPS)
_COLUMNS = gl.constexpr(COLUMNS)
_ROWS = gl.constexpr(2 * COLUMNS)
_SPAN = gl.constexpr(SPAN)


class Shape(NamedTuple):
    """Sizes and what is fused, all constants of the kernel.

    Attributes:
        size: K.
        held: E.
        chosen: k.
        parts: pairs of rows of x: 1 for gate and up, k / 2 for down.
        units: times 16 rows of weights in a step.
        stages: steps in shared memory.
        activation: of gate and up, None for down.
        adds: whether the result is added to the residual.
    """

    size: Any
    held: Any
    chosen: Any
    parts: Any
    units: Any
    stages: Any
    activation: Any
    adds: Any


class Operands(NamedTuple):
    """Pointers beside the weight: x [1 or k, K], biases [E, N] or None, and the choice, [k] each."""

    x: Any
    bias: Any
    experts: Any
    factors: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory, one or several for each stage, and their ring."""

    words: Any
    exponents: Any
    ring: Any


def gemv(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
) -> None:
    """Multiply as stacked_experts.Gemv says: a single token, in bfloat16; sums are float32."""
    num_chosen = choice.experts.shape[1]
    reason = unsupported_reason(x, weight, num_chosen)
    if reason is not None:
        raise InvalidArgumentError(f"the GEMV of experts cannot run: {reason}")
    num_experts, _, size = weight.shape
    is_gated = activation is not None
    tiling = mxfp4_gemv_tiling_for(size, num_chosen, is_gated=is_gated)
    shape = Shape(
        size=size,
        held=num_experts,
        chosen=num_chosen,
        parts=tiling.parts,
        units=tiling.units,
        stages=tiling.stages,
        activation=activation,
        adds=adds,
    )
    words, exponents = weight.words, weight.exponents
    boxes = copy_boxes(is_gated=is_gated)
    if is_gated:
        words = words.unflatten(2, (2, -1)).permute(2, 0, 1, 3, 4)
        exponents = exponents.unflatten(2, (2, -1)).permute(2, 0, 1, 3)
    launch(
        mxfp4_gemv_kernel,
        # One program per SM, even if it has no tile: see float_gemv.
        (num_multiprocessors(x.device),),
        words=describe_matrix(words, boxes[0], swizzle_bytes=64),
        exponents=describe_matrix(exponents, boxes[1], swizzle_bytes=4 * boxes[1][-1]),
        operands=Operands(x=x, bias=weight.bias, experts=choice.experts, factors=choice.weights),
        out=out,
        num_columns=words.shape[-2],
        shape=constants(shape),
        num_warps=WARPS,
        maxnreg=REGISTERS,
        launch_pdl=overlaps(x),
    )


@gluon.jit(do_not_specialize=["num_columns"])
def mxfp4_gemv_kernel(words, exponents, operands, out, num_columns, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        words: of the weight as TMA sees them, of gate and up [2, E, spans, n, 16], of down [E, spans, H, 16].
        exponents: likewise, without the last dimension.
        operands: see there.
        out: of gate and up [k, n]; of down [H], the residual if the result is added to it.
        num_columns: n or H.
        shape: see there.
    """
    PLANES: gl.constexpr = shape.parts * ceil_div(shape.size, _WARPS * _SPAN)
    gdc_launch_dependents()
    # Gate and up are one copy; down is a copy for each expert.
    COPIES: gl.constexpr = 1 if shape.activation is not None else 2 * shape.units
    pipe = _Pipe(
        _allocate(words, COPIES * shape.stages),
        _allocate(exponents, COPIES * shape.stages),
        make_ring(shape.stages),
    )
    row = gl.allocate_shared_memory(
        gl.bfloat16,
        [PLANES, BLOCKS, _WARPS, 2, _SPAN // BLOCKS],
        gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]),
    )
    sums = gl.allocate_shared_memory(gl.float32, [2, _WARPS, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.warp_specialize(
        [
            (_multiply, (pipe, row, sums, operands, out, num_columns, shape)),
            (_fetch, (gl.constexpr(0), words, exponents, pipe, operands, num_columns, shape)),
            (_fetch, (gl.constexpr(1), words, exponents, pipe, operands, num_columns, shape)),
            (_fetch, (gl.constexpr(2), words, exponents, pipe, operands, num_columns, shape)),
            (_fetch, (gl.constexpr(3), words, exponents, pipe, operands, num_columns, shape)),
        ],
        [1, 1, 1, 1],
        [40, 40, 40, 40],
    )


@gluon.jit
def _allocate(matrix, COPIES: gl.constexpr):
    """Return shared memory for COPIES boxes that TMA copies."""
    SHAPE: gl.constexpr = [COPIES] + matrix.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(matrix.dtype, SHAPE, matrix.layout)


@gluon.jit
def _fetch(index: gl.constexpr, words, exponents, pipe, operands, num_columns, shape):
    """Fetch a warp's part of all tiles; what lies past the ends, or is of no expert here, reads as zero."""
    gdc_wait()
    if shape.activation is None:
        if index < 2 * shape.units:
            _fetch_down(index, words, exponents, pipe, operands, num_columns, shape)
    elif index == 0:
        _fetch_gate_up(words, exponents, pipe, operands, num_columns, shape)


@gluon.jit
def _fetch_gate_up(words, exponents, pipe, operands, num_columns, shape):
    """Fetch all steps of all tiles."""
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    BYTES: gl.constexpr = words.block_type.nbytes + exponents.block_type.nbytes
    step = 0
    for tile in range(num_tiles(num_columns, shape.chosen, _ROWS)):
        number, begin = place_tile(tile, num_columns, _ROWS)
        expert = gl.load(operands.experts + number)
        for turn in range(STEPS):
            stage, filled = claim_stage(pipe.ring, step, BYTES, shape.stages)
            at = [0, expert, turn * _WARPS, begin, 0]
            tma.async_copy_global_to_shared(words, at, filled, pipe.words.index(stage))
            at = [0, expert, turn * _WARPS, begin]
            tma.async_copy_global_to_shared(exponents, at, filled, pipe.exponents.index(stage))
            step += 1


@gluon.jit
def _fetch_down(index: gl.constexpr, words, exponents, pipe, operands, num_columns, shape):
    """Fetch one expert's part of all steps of all tiles."""
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    BYTES: gl.constexpr = 2 * shape.units * (words.block_type.nbytes + exponents.block_type.nbytes)
    step = 0
    for tile in range(num_tiles(num_columns, 1, _COLUMNS)):
        _, begin = place_tile(tile, num_columns, _COLUMNS)
        for group in range(shape.parts // shape.units):
            expert = gl.load(operands.experts + 2 * shape.units * group + index)
            for turn in range(STEPS):
                keep_pace(pipe.ring, step, BYTES, shape.stages)
                stage = wait_until_free(pipe.ring, step, shape.stages)
                filled = pipe.ring.filled.index(stage)
                if index == 0:
                    mbarrier.expect(filled, BYTES)
                place = 2 * shape.units * stage + index
                at = [expert, turn * _WARPS, begin, 0]
                tma.async_copy_global_to_shared(words, at, filled, pipe.words.index(place))
                at = [expert, turn * _WARPS, begin]
                tma.async_copy_global_to_shared(exponents, at, filled, pipe.exponents.index(place))
                step += 1


@gluon.jit
def _multiply(pipe, row, sums, operands, out, num_columns, shape):
    """Multiply all tiles and store the results."""
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    IS_DOWN: gl.constexpr = shape.activation is None
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    OWN: gl.constexpr = _COLUMNS if IS_DOWN else _ROWS
    RESULTS: gl.constexpr = 1 if IS_DOWN else shape.chosen
    half = gl.arange(0, _ROWS, gl.SliceLayout(0, gl.SliceLayout(2, PRODUCT))) // _COLUMNS
    meets = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, PRODUCT))) // 4
    counts = half[None, :, None] == meets[None, None, :]
    # The four columns that count are equal.
    after: gl.constexpr = 0.25 * SMALLER
    gdc_wait()
    experts, factors = load_choice(operands, shape)
    keep_rows(row, operands.x, shape)
    step = 0
    for tile in range(num_tiles(num_columns, RESULTS, OWN)):
        number, begin = place_tile(tile, num_columns, OWN)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        # These loads overlap with the products; the epilogue needs them.
        biases, old = load_epilogue(operands, out, experts, number, column, inside, num_columns, shape)
        total = gl.zeros([_WARPS, _ROWS, 8], gl.float32, PRODUCT)
        for group in gl.static_range(shape.parts // shape.units if IS_DOWN else 1):
            added = ()
            for _ in gl.static_range(shape.units):
                added = added + (gl.zeros([_WARPS, _ROWS, 8], gl.float32, PRODUCT),)  # noqa: RUF005
            for turn in range(STEPS):
                added = _add_step(added, pipe, row, group, turn, step, shape)
                step += 1
            for unit in gl.static_range(shape.units):
                if IS_DOWN:
                    factor = _of_halves(factors, 2 * (group * shape.units + unit), half)
                    total += added[unit] * factor[None, :, None]
                else:
                    sums.index(unit).store(gl.sum(gl.where(counts, added[unit], 0.0), 2) * after)
        if IS_DOWN:
            sums.index(0).store(gl.sum(gl.where(counts, total, 0.0), 2) * after)
        result = finish(sums, biases, factors, shape, OUT) + old
        gl.store(out + number * num_columns + column, result.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _of_halves(factors, index: gl.constexpr, half):
    """Return the factors of two experts, each where its half is."""
    return gl.where(half == 0, factors[index], factors[index + 1])


@gluon.jit
def _add_step(added, pipe, row, group, turn, step, shape):
    """Add the products of a step to those of each unit, [W, rows, 8] float32."""
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    IS_DOWN: gl.constexpr = shape.activation is None
    stage = wait_for_stage(pipe.ring, step, shape.stages)
    words = ()
    exponents = ()
    for unit in gl.static_range(shape.units):
        if IS_DOWN:
            place = 2 * (stage * shape.units + unit)
            words = words + (load_two_words(pipe.words, place),)  # noqa: RUF005
            exponents = exponents + (load_two_exponents(pipe.exponents, place),)  # noqa: RUF005
        else:
            words = words + (load_words(pipe.words.index(stage), unit),)  # noqa: RUF005
            exponents = exponents + (load_exponents(pipe.exponents.index(stage), unit),)  # noqa: RUF005
    free_stage(pipe.ring, stage)
    for block in gl.static_range(BLOCKS):
        x = load_x(row, (group * shape.units * STEPS if IS_DOWN else 0) + turn, block)
        sums = ()
        for unit in gl.static_range(shape.units):
            if IS_DOWN and unit > 0:
                x = load_x(row, (group * shape.units + unit) * STEPS + turn, block)
            sums = sums + (added[unit] + multiply_block(words[unit], exponents[unit], x, block),)  # noqa: RUF005
        added = sums
    return added
