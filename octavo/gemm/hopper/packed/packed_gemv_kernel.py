"""The kernel of packed_gemv_linear: gemv_kernel's warps and pipeline, with packed weights of 4 bits.

A stage in shared memory:

    words    2 atoms of each span | spans | gate and up | rows | 16 words, chunks of 16 bytes swizzled
    pairs    gate and up | groups | rows                                a scale and a minimum of each

The row lies there as digits (digits), which words meet on tensor cores (products).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.gemv_tiles import ceil_div, load_epilogue, num_tiles, place_tile, store_tile
from octavo.gemm.hopper.packed.digits import allocate_row, keep_digits, load_row
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS
from octavo.gemm.hopper.packed.products import half_mask, multiply_tile
from octavo.kernels.ring import claim_stage, make_ring

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_SPAN = gl.constexpr(SPAN)
_SPANS = gl.constexpr(SPANS_AT_ONCE)


class PackedPipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring."""

    words: Any
    pairs: Any
    ring: Any


@gluon.jit(do_not_specialize=["num_columns"])
def packed_gemv_kernel(words, pairs, operands, out, num_columns, eps, factor, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        words: of the weight as TMA sees them, [2, spans, halves, rows of a half, 16].
        pairs: of scales and minimums, [groups, halves, rows of a half].
        operands: see gemv.kernel; there are no scales.
        out: [num_columns], the residual if the result is added to it.
        num_columns: of the result.
        eps: of the norm.
        factor: of scales and minimums.
        shape: see gemv.kernel; blocks are spans.
    """
    OWN: gl.constexpr = _ROWS // shape.halves
    X_STEPS: gl.constexpr = ceil_div(shape.size, _SPANS * _SPAN)
    _let_next_in(False, shape)
    pipe = PackedPipe(
        gl.allocate_shared_memory(
            gl.int32, [shape.stages, 2, shape.blocks * _WARPS, shape.halves, OWN, 16], words.layout
        ),
        gl.allocate_shared_memory(
            gl.int32,
            [shape.stages * shape.halves, 2 * shape.blocks * _WARPS, 1, OWN],
            pairs.layout,
        ),
        make_ring(shape.stages),
    )
    row, totals = allocate_row(X_STEPS)
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    gl.warp_specialize(
        [
            (_multiply, (pipe, row, totals, parts, operands, out, num_columns, eps, factor, shape)),
            (_fetch, (words, pairs, pipe, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.jit
def _let_next_in(IS_ROW_HERE: gl.constexpr, shape):
    """Let the next kernel in: at the start, or when the row is here, which is better before attention."""
    IS_PROJECTION_TO_HEADS: gl.constexpr = shape.norm and shape.activation is None
    if IS_PROJECTION_TO_HEADS == IS_ROW_HERE:
        gdc_launch_dependents()


@gluon.jit
def _fetch(words, pairs, pipe, num_columns, shape):
    """Fetch all steps of all tiles; what lies past the ends reads as zero."""
    SPANS: gl.constexpr = shape.blocks * _WARPS
    STEPS: gl.constexpr = ceil_div(shape.size, SPANS * _SPAN)
    STEP_BYTES: gl.constexpr = words.block_type.nbytes + shape.halves * pairs.block_type.nbytes
    step = 0
    for tile in range(num_tiles(num_columns, 1, _ROWS // shape.halves)):
        _, begin = place_tile(tile, num_columns, _ROWS // shape.halves, 0)
        for turn in range(STEPS):
            stage, filled = claim_stage(pipe.ring, step, STEP_BYTES, shape.stages)
            at = [0, turn * SPANS, 0, begin, 0]
            tma.async_copy_global_to_shared(words, at, filled, pipe.words.index(stage))
            for half in gl.static_range(shape.halves):
                at = [turn * 2 * SPANS, half, begin]
                tma.async_copy_global_to_shared(
                    pairs, at, filled, pipe.pairs.index(stage * shape.halves + half)
                )
            step += 1


@gluon.jit
def _multiply(pipe, row, totals, parts, operands, out, num_columns, eps, factor, shape):
    """Multiply all tiles and store the results."""
    OWN: gl.constexpr = _ROWS // shape.halves
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    STEPS: gl.constexpr = row.shape[0]
    mask = half_mask()
    # Of the model, so it need not wait.
    norms = ()
    if shape.norm:
        norms = load_row(operands.norm, STEPS, shape)
    gdc_wait()
    after = keep_digits(row, totals, load_row(operands.x, STEPS, shape), norms, eps, shape)
    _let_next_in(True, shape)
    for tile in range(num_tiles(num_columns, 1, _ROWS // shape.halves)):
        _, begin = place_tile(tile, num_columns, _ROWS // shape.halves, 0)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        # Loaded now, needed after the products.
        scale, bias, old = load_epilogue(operands, out, column, num_columns, shape)
        parts.store(multiply_tile(pipe, row, totals, mask, after, tile, shape))
        store_tile(parts, scale, bias, old, factor, out, column, inside, shape, OUT)
