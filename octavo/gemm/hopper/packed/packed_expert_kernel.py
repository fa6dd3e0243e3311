"""The kernel of a single token's packed experts: the packed GEMV's products (packed_gemv_kernel).

    gate and up    a tile is 8 columns of gate and of up, of one of the token's experts; they share the row x
    down           a tile is 16 columns of the token's sum. The rows of x of its experts, times the experts'
                   weights, are a single row, which meets the rows of those experts' weights side by side

A step has a span for each warp: of one expert, or of several short ones. In the row an expert takes whole
boxes; past its K there are zeros, and TMA reads zeros. What a rank does not hold is outside, too.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.gemv_tiles import ceil_div, num_tiles, place_tile, store_tile
from octavo.gemm.hopper.packed.digits import (
    allocate_row,
    columns_of_spans,
    first_columns,
    keep_digits,
)
from octavo.gemm.hopper.packed.packed_gemv_kernel import PackedPipe
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS
from octavo.gemm.hopper.packed.products import half_mask, multiply_tile
from octavo.kernels.ring import claim_stage, make_ring

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_SPAN = gl.constexpr(SPAN)
_SPANS = gl.constexpr(SPANS_AT_ONCE)


class Shape(NamedTuple):
    """Sizes, tiling and what is fused, all constants of the kernel.

    Attributes:
        size: columns of a tile: summed * padded.
        each: K.
        padded, columns: see PackedGemvTiling.
        held: E.
        chosen: k.
        summed: experts that a tile adds up: 1 of gate and up, k of down.
        halves: 2 of gate and up, 1 of down.
        blocks, norm: 1 and False; see linear.gemv.kernel.
        stages: see PackedGemvTiling.
        activation: of gate and up, None for down.
        adds: whether the result is added to the residual.
    """

    size: Any
    each: Any
    padded: Any
    columns: Any
    held: Any
    chosen: Any
    summed: Any
    halves: Any
    blocks: Any
    stages: Any
    norm: Any
    activation: Any
    adds: Any


class Operands(NamedTuple):
    """Pointers: x [1 or k, K], the choice [1, k] each, factors [E, halves] of scales and minimums."""

    x: Any
    experts: Any
    weights: Any
    factors: Any


@gluon.jit(do_not_specialize=["num_columns"])
def packed_expert_kernel(words, pairs, operands, out, num_columns, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        words: as TMA sees them, [2, spans, E halves, rows of a half, 16].
        pairs: of scales and minimums, [E, groups, halves, rows of a half].
        operands: see there.
        out: of gate and up [k, n]; of down [1, N], the residual if the result is added to it.
        num_columns: n or N.
        shape: see there.
    """
    X_STEPS: gl.constexpr = shape.columns // (_SPANS * _SPAN)
    OWN: gl.constexpr = _ROWS // shape.halves
    gdc_launch_dependents()
    pipe = PackedPipe(
        gl.allocate_shared_memory(gl.int32, [shape.stages, 2, _WARPS, shape.halves, OWN, 16], words.layout),
        gl.allocate_shared_memory(
            gl.int32, [shape.stages * shape.halves, 1, 2 * _WARPS, 1, OWN], pairs.layout
        ),
        make_ring(shape.stages),
    )
    row, totals = allocate_row(X_STEPS)
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.warp_specialize(
        [
            (_multiply, (pipe, row, totals, parts, operands, out, num_columns, shape)),
            (_fetch, (words, pairs, pipe, operands, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _fetch(words, pairs, pipe, operands, num_columns, shape):
    """Fetch all steps of all tiles."""
    OWN: gl.constexpr = _ROWS // shape.halves
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    BOX: gl.constexpr = words.block_type.shape[1]
    BOXES: gl.constexpr = _WARPS // BOX
    STEP_BYTES: gl.constexpr = BOXES * (2 * words.block_type.nbytes + shape.halves * pairs.block_type.nbytes)
    WORDS: gl.constexpr = [2 * BOXES] + words.block_type.shape  # noqa: RUF005
    PAIRS: gl.constexpr = [BOXES] + pairs.block_type.shape  # noqa: RUF005
    gdc_wait()
    step = 0
    for tile in range(num_tiles(num_columns, shape.chosen // shape.summed, OWN)):
        number, begin = place_tile(tile, num_columns, OWN)
        for turn in range(STEPS):
            stage, filled = claim_stage(pipe.ring, step, STEP_BYTES, shape.stages)
            atoms = pipe.words.index(stage)._reinterpret(gl.int32, WORDS, words.layout)
            for box in gl.static_range(BOXES):
                column = (turn * _WARPS + box * BOX) * _SPAN
                index = column // shape.padded
                span = (column - index * shape.padded) // _SPAN
                # Past the last expert there is none.
                is_any = index < shape.summed
                expert = gl.load(
                    operands.experts + number * shape.summed + index, mask=is_any, other=shape.held
                )
                for atom in gl.static_range(2):
                    at = [atom, span, shape.halves * expert, begin, 0]
                    tma.async_copy_global_to_shared(words, at, filled, atoms.index(atom * BOXES + box))
                for half in gl.static_range(shape.halves):
                    of_half = pipe.pairs.index(shape.halves * stage + half)
                    of_half = of_half._reinterpret(gl.int32, PAIRS, pairs.layout)
                    at = [expert, 2 * span, half, begin]
                    tma.async_copy_global_to_shared(pairs, at, filled, of_half.index(box))
            step += 1


@gluon.jit
def _multiply(pipe, row, totals, parts, operands, out, num_columns, shape):
    """Multiply all tiles and store the results."""
    OWN: gl.constexpr = _ROWS // shape.halves
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    mask = half_mask()
    gdc_wait()
    after = keep_digits(row, totals, _load_row(operands, row.shape[0], shape), (), 0.0, shape)
    for tile in range(num_tiles(num_columns, shape.chosen // shape.summed, OWN)):
        number, begin = place_tile(tile, num_columns, OWN)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        # Loaded now, needed after the products.
        scales = (1.0, 1.0)
        to = out
        if shape.activation is not None:
            expert = gl.load(operands.experts + number)
            at = operands.factors + 2 * expert
            is_held = expert < shape.held
            scales = (gl.load(at, mask=is_held, other=0.0), gl.load(at + 1, mask=is_held, other=0.0))
            to += number * num_columns
        old = 0.0
        if shape.adds:
            old = gl.load(to + column, mask=inside, other=0.0).to(gl.float32)
        parts.store(multiply_tile(pipe, row, totals, mask, after, tile, shape))
        store_tile(parts, scales, (0.0, 0.0), old, 1.0, to, column, inside, shape, OUT)


@gluon.jit
def _load_row(operands, STEPS: gl.constexpr, shape):
    """Load the row as load_row does: of down each expert's, times its weight and its factor."""
    column = columns_of_spans()
    rows = ()
    for step in gl.static_range(STEPS):
        first = step * (_SPANS * _SPAN) + first_columns()
        index = first // shape.padded
        is_any = index < shape.summed
        k = (first - index * shape.padded)[:, None, None] + column
        at = operands.x + (index * shape.each)[:, None, None] + k
        numbers = gl.load(at, mask=is_any[:, None, None] & (k < shape.each), other=0.0)
        if shape.activation is None:
            expert = gl.load(operands.experts + index, mask=is_any, other=shape.held)
            factor = gl.load(operands.factors + expert, mask=expert < shape.held, other=0.0)
            factor *= gl.load(operands.weights + index, mask=is_any, other=0.0)
            numbers = numbers.to(gl.float32) * factor[:, None, None]
        rows = rows + (numbers,)  # noqa: RUF005
    return rows
