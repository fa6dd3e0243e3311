"""The GEMV's kernel with packed weights of 4 bits: warps and pipeline of float_gemv_kernel, digits of x.

    dense weight    a tile is 16 rows; with an activation 8 of gate and 8 of up
    experts         a single token has k experts:
      gate and up     a tile is 8 columns of gate and of up, of one of the experts; they share the row x
      down            a tile is 16 columns of the token's sum. Rows of x of its experts, times the experts'
                      weights, are a single row, which meets the rows of those experts' weights side by side

A step of experts has a span for each warp: of one expert, or of several short ones. In the row an expert
takes whole boxes; past its K there are zeros, and TMA reads zeros. What a rank does not hold lies outside,
too. A stage in shared memory:

    words    2 atoms of each span | spans | gate and up | rows | 16 words, chunks of 16 bytes swizzled
    pairs    gate and up | groups | rows                                a scale and a minimum of each

The row lies there as digits, which words meet on tensor cores (digits.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.gemv_tiles import ceil_div, load_epilogue, num_tiles, place_tile, store_tile
from octavo.gemm.hopper.packed.digits import (
    allocate_row,
    columns_of_spans,
    first_columns,
    half_mask,
    keep_digits,
    load_row,
    multiply_tile,
)
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS
from octavo.kernels.ring import claim_stage, make_ring

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_SPAN = gl.constexpr(SPAN)
_SPANS = gl.constexpr(SPANS_AT_ONCE)


class Shape(NamedTuple):
    """Sizes, tiling and what is fused, all constants of the kernel.

    Attributes:
        size: K.
        padded: columns that an expert takes of the row, whole boxes; K of a dense weight.
        halves: 2 with an activation, which needs a row of gate and one of up, else 1.
        blocks: spans of a warp per step; 1 for experts.
        stages: steps in shared memory.
        norm: whether x is normed.
        activation: name or None.
        adds: whether the result is added to the residual.
        experts: E; 0: the weight is dense.
        chosen: k.
        summed: experts that a tile adds up: k for down, else 1.
    """

    size: Any
    padded: Any
    halves: Any
    blocks: Any
    stages: Any
    norm: Any
    activation: Any
    adds: Any
    experts: Any = 0
    chosen: Any = 1
    summed: Any = 1


class Operands(NamedTuple):
    """Pointers beside the weight, None where there is none.

    Attributes:
        x: [K], or of experts' down [k, K].
        norm: weight of x's norm, [K].
        bias: a dense weight's, [N].
        ids: the chosen experts, [1, k] int32.
        weights: their results' factors, [1, k] float32.
        factors: factors of experts' scales and minimums, [E, halves] float32.
    """

    x: Any
    norm: Any = None
    bias: Any = None
    ids: Any = None
    weights: Any = None
    factors: Any = None


class _Pipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring."""

    words: Any
    pairs: Any
    ring: Any


@gluon.jit(do_not_specialize=["num_columns"])
def packed_gemv_kernel(words, pairs, operands, out, num_columns, eps, factor, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        words: the weight's as TMA sees them, [2, spans, halves, rows of a half, 16], with experts E halves.
        pairs: scales and minimums, [groups, halves, rows of a half], with experts [E, ...].
        operands: see Operands.
        out: [num_columns]; for experts' gate and up [k, n], for down [1, N]; the residual if the result is
            added to it.
        num_columns: columns of the result.
        eps: added to the norm's mean square.
        factor: a dense weight's factor of scales and minimums.
        shape: see Shape.
    """
    OWN: gl.constexpr = _ROWS // shape.halves
    GROUPS: gl.constexpr = [2 * shape.blocks * _WARPS, 1, OWN]
    PAIRS: gl.constexpr = GROUPS if shape.experts == 0 else [1] + GROUPS  # noqa: RUF005
    _let_next_in(False, shape)
    pipe = _Pipe(
        gl.allocate_shared_memory(
            gl.int32, [shape.stages, 2, shape.blocks * _WARPS, shape.halves, OWN, 16], words.layout
        ),
        gl.allocate_shared_memory(gl.int32, [shape.stages * shape.halves] + PAIRS, pairs.layout),  # noqa: RUF005
        make_ring(shape.stages),
    )
    row, totals = allocate_row(ceil_div(shape.summed * shape.padded, _SPANS * _SPAN))
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.warp_specialize(
        [
            (_multiply, (pipe, row, totals, parts, operands, out, num_columns, eps, factor, shape)),
            (_fetch, (words, pairs, pipe, operands, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _let_next_in(IS_ROW_HERE: gl.constexpr, shape):
    """Let the next kernel start: at once, or, which is better before attention, when the row is here."""
    IS_PROJECTION_TO_HEADS: gl.constexpr = shape.norm and shape.activation is None
    if IS_PROJECTION_TO_HEADS == IS_ROW_HERE:
        gdc_launch_dependents()


@gluon.jit
def _fetch(words, pairs, pipe, operands, num_columns, shape):
    """Fetch all steps of all tiles; what lies past the ends, or is of no expert here, reads as zero."""
    OWN: gl.constexpr = _ROWS // shape.halves
    STEPS: gl.constexpr = ceil_div(shape.summed * shape.padded, shape.blocks * _WARPS * _SPAN)
    # Copies per stage: boxes of spans, each of one or both atoms.
    BOXES: gl.constexpr = shape.blocks * _WARPS // words.block_type.shape[1]
    ATOMS: gl.constexpr = 2 // words.block_type.shape[0]
    STEP_BYTES: gl.constexpr = BOXES * (
        ATOMS * words.block_type.nbytes + shape.halves * pairs.block_type.nbytes
    )
    if shape.experts > 0:
        gdc_wait()
    step = 0
    for tile in range(num_tiles(num_columns, shape.chosen // shape.summed, OWN)):
        number, begin = place_tile(tile, num_columns, OWN, shape.experts)
        for turn in range(STEPS):
            stage, filled = claim_stage(pipe.ring, step, STEP_BYTES, shape.stages)
            if shape.experts > 0:
                first = number * shape.summed
                _fetch_experts(words, pairs, pipe, operands, first, turn, begin, stage, filled, BOXES, shape)
            else:
                _fetch_step(words, pairs, pipe, turn, begin, stage, filled, shape)
            step += 1


@gluon.jit
def _fetch_step(words, pairs, pipe, turn, begin, stage, filled, shape):
    """Fetch a step of a dense weight."""
    SPANS: gl.constexpr = shape.blocks * _WARPS
    tma.async_copy_global_to_shared(words, [0, turn * SPANS, 0, begin, 0], filled, pipe.words.index(stage))
    for half in gl.static_range(shape.halves):
        at = [turn * 2 * SPANS, half, begin]
        tma.async_copy_global_to_shared(pairs, at, filled, pipe.pairs.index(stage * shape.halves + half))


@gluon.jit
def _fetch_experts(
    words, pairs, pipe, operands, first, turn, begin, stage, filled, BOXES: gl.constexpr, shape
):  # fmt: skip
    """Fetch a step of the chosen experts from `first` on."""
    WORDS: gl.constexpr = [2 * BOXES] + words.block_type.shape  # noqa: RUF005
    PAIRS: gl.constexpr = [BOXES] + pairs.block_type.shape  # noqa: RUF005
    atoms = pipe.words.index(stage)._reinterpret(gl.int32, WORDS, words.layout)
    for box in gl.static_range(BOXES):
        column = (turn * _WARPS + box * (_WARPS // BOXES)) * _SPAN
        index = column // shape.padded
        span = (column - index * shape.padded) // _SPAN
        # The row may be longer than all experts; TMA reads zeros for expert E, which does not exist.
        expert = gl.load(operands.ids + first + index, mask=index < shape.summed, other=shape.experts)
        for atom in gl.static_range(2):
            at = [atom, span, shape.halves * expert, begin, 0]
            tma.async_copy_global_to_shared(words, at, filled, atoms.index(atom * BOXES + box))
        for half in gl.static_range(shape.halves):
            of_half = pipe.pairs.index(shape.halves * stage + half)
            of_half = of_half._reinterpret(gl.int32, PAIRS, pairs.layout)
            at = [expert, 2 * span, half, begin]
            tma.async_copy_global_to_shared(pairs, at, filled, of_half.index(box))


@gluon.jit
def _multiply(pipe, row, totals, parts, operands, out, num_columns, eps, factor, shape):
    """Multiply all tiles and store the results."""
    OWN: gl.constexpr = _ROWS // shape.halves
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    STEPS: gl.constexpr = row.shape[0]
    mask = half_mask()
    norms = ()
    if shape.norm:
        # The model's own weight, which no kernel writes: no need to wait.
        norms = load_row(operands.norm, STEPS, shape.size)
    gdc_wait()
    if shape.experts > 0:
        xs = _load_experts_rows(operands, STEPS, shape)
    else:
        xs = load_row(operands.x, STEPS, shape.size)
    after = keep_digits(row, totals, xs, norms, eps, shape)
    _let_next_in(True, shape)
    for tile in range(num_tiles(num_columns, shape.chosen // shape.summed, OWN)):
        number, begin = place_tile(tile, num_columns, OWN, shape.experts)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        out_at = out + number * num_columns
        # These loads overlap with the products; the epilogue needs them.
        scale = _load_factors(operands, number, factor, shape)
        bias, old = load_epilogue(operands, out_at, column, num_columns, shape)
        parts.store(multiply_tile(pipe, row, totals, mask, after, tile, shape))
        store_tile(parts, scale, bias, old, 1.0, out_at, column, inside, shape, OUT)


@gluon.jit
def _load_factors(operands, number, factor, shape):
    """Return the factors of gate and of up; those of down are in the row of x."""
    factors = (factor, factor)
    if shape.experts > 0:
        factors = (1.0, 1.0)
        if shape.activation is not None:
            expert = gl.load(operands.ids + number)
            at = operands.factors + 2 * expert
            is_held = expert < shape.experts
            factors = (gl.load(at, mask=is_held, other=0.0), gl.load(at + 1, mask=is_held, other=0.0))
    return factors


@gluon.jit
def _load_experts_rows(operands, STEPS: gl.constexpr, shape):
    """Load the row as load_row does; for down each expert's part, times its weight and its factor."""
    column = columns_of_spans()
    rows = ()
    for step in gl.static_range(STEPS):
        first = step * (_SPANS * _SPAN) + first_columns()
        index = first // shape.padded
        is_any = index < shape.summed
        k = (first - index * shape.padded)[:, None, None] + column
        at = operands.x + (index * shape.size)[:, None, None] + k
        numbers = gl.load(at, mask=is_any[:, None, None] & (k < shape.size), other=0.0)
        if shape.activation is None:
            expert = gl.load(operands.ids + index, mask=is_any, other=shape.experts)
            factor = gl.load(operands.factors + expert, mask=expert < shape.experts, other=0.0)
            factor *= gl.load(operands.weights + index, mask=is_any, other=0.0)
            numbers = numbers.to(gl.float32) * factor[:, None, None]
        rows = rows + (numbers,)  # noqa: RUF005
    return rows
