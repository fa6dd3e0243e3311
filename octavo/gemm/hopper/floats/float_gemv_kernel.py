"""The GEMV's kernel: one warp fetches weights by TMA, four multiply them on tensor cores.

    TMA warp (_fetch)                         warps that multiply (_multiply)

    for each tile of 16 rows of the weight:   wait for the kernel before
      for each step along K:                  rows of x, normed: to shared memory
        wait free[stage]                      for each tile:
        atoms of all warps -> weights[stage]    for each step:
                                                  wait filled[stage]
                                                  read the warp's atoms; arrive free[stage]
                                                  sums += atoms * x
                                                add up the warps' sums, epilogue, store

    dense weight    a tile is 16 rows; with an activation 8 of gate and 8 of up
    experts         1 to 4 tokens have k experts each:
      gate and up     a tile is 8 columns of gate and of up, of one of a token's experts
      down            a tile is 16 columns of a token's sum: rows of each of its experts, one after the other

Dense weights never wait for the kernel before; with experts a program waits and then reads which are chosen.
What a rank does not hold lies outside the tensor, and reads as zero. A program takes half of an SM: while one
runs, the next kernel's program fills its stages beside it. TMA writes a stage of shared memory:

    blocks x warps atoms | 16 rows (gate and up: 8 + 8) | 64 bytes of K, chunks of 16 bytes swizzled

Block b of warp w is the atom b * W + w. A thread reads 16 bytes of two rows, as an operand of `mma`: eight or
sixteen neighbours of K. Hence it reads such neighbours of x, too. Tensor cores want 8 columns, so x is
repeated.

Float8 weights become float16, which holds them exactly, and x becomes numbers that float16 holds
(gemv_operands.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, X_STEP
from octavo.gemm.hopper.floats.gemv_operands import (
    SUMS,
    first_scales,
    keep_row,
    load_factor,
    load_ratios,
    load_row,
    load_row_scales,
)
from octavo.gemm.hopper.gemv_tiles import ceil_div, load_epilogue, num_tiles, place_tile, store_tile
from octavo.kernels.ring import claim_stage, free_stage, make_ring, wait_for_stage

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_X_STEP = gl.constexpr(X_STEP)
_ATOM_BITS = gl.constexpr(8 * ATOM_BYTES)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Shape(NamedTuple):
    """Sizes, tiling and what is fused, all constants of the kernel.

    Attributes:
        size: K.
        halves: 2 with an activation, which needs a row of gate and one of up, else 1.
        blocks: atoms of a warp per step.
        stages: steps in shared memory.
        norm: whether x is normed.
        activation: name or None.
        adds: whether the result is added to the residual.
        height: rows of the weight that share a scale, 1 for experts; 0: there are no scales.
        width: numbers of a row that share a scale.
        experts: E; 0: the weight is dense.
        chosen: k.
        summed: experts that a tile adds up: k for down, else 1.
        tokens: rows of x, or for down k rows each.
    """

    size: Any
    halves: Any
    blocks: Any
    stages: Any
    norm: Any
    activation: Any
    adds: Any
    height: Any
    width: Any
    experts: Any = 0
    chosen: Any = 1
    summed: Any = 1
    tokens: Any = 1


class Operands(NamedTuple):
    """Pointers beside the weight, None where there is none.

    Attributes:
        x: [K], or with experts [T, K] or [T k, K].
        norm: weight of x's norm, [K].
        scales: a dense weight's [N / height, K / width], or experts' [E, K / width, N].
        bias: a dense weight's, [N].
        ids: the chosen experts, [T, k] int32.
        factors: their results' factors, [T, k] float32.
    """

    x: Any
    norm: Any = None
    scales: Any = None
    bias: Any = None
    ids: Any = None
    factors: Any = None


class _Pipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring."""

    weights: Any
    ring: Any


@gluon.jit(do_not_specialize=["num_columns", "stride_out"])
def float_gemv_kernel(matrix, operands, out, num_columns, stride_out, eps, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        matrix: the weight as TMA sees it, [K in atoms, halves, rows of a half, atom], or with experts
            [K in atoms, E, halves, rows of a half, atom].
        operands: see Operands.
        out: [num_columns]; for experts' gate and up [T k, n], for down [T, N]; the residual if the result is
            added to it.
        num_columns: columns of the result.
        stride_out: numbers between rows of out.
        eps: added to the norm's mean square.
        shape: see Shape.
    """
    DTYPE: gl.constexpr = matrix.dtype if shape.height == 0 else gl.float16
    gdc_launch_dependents()
    pipe = _Pipe(
        gl.allocate_shared_memory(matrix.dtype, [shape.stages] + matrix.block_type.shape, matrix.layout),  # noqa: RUF005
        make_ring(shape.stages),
    )
    ATOM: gl.constexpr = _ATOM_BITS // matrix.dtype.primitive_bitwidth
    X_STEPS: gl.constexpr = _x_steps(shape.size, shape.summed, shape.blocks, ATOM)
    rows = gl.allocate_shared_memory(DTYPE, [shape.tokens * X_STEPS, _X_STEP], _FLAT)
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], _PLAIN)
    gl.warp_specialize(
        [
            (_multiply, (pipe, rows, parts, operands, out, num_columns, stride_out, eps, shape)),
            (_fetch, (matrix, pipe, operands, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.constexpr_function
def _x_steps(size, summed, blocks, atom):
    """Return how many times X_STEP numbers a token's rows of x take; the last row has whole steps."""
    atoms = ceil_div(size, WARPS * atom)
    padded = (summed - 1) * atoms + ceil_div(atoms, blocks) * blocks
    return ceil_div(padded * WARPS * atom, X_STEP)


@gluon.jit
def _fetch(matrix, pipe, operands, num_columns, shape):
    """Fetch all steps of all tiles; what lies past the ends, or is of no expert here, reads as zero."""
    OWN: gl.constexpr = _ROWS // shape.halves
    RESULTS: gl.constexpr = shape.tokens * shape.chosen // shape.summed
    ATOMS: gl.constexpr = shape.blocks * _WARPS
    STEPS: gl.constexpr = ceil_div(shape.size, ATOMS * (_ATOM_BITS // matrix.dtype.primitive_bitwidth))
    if shape.experts > 0:
        gdc_wait()
    step = 0
    for tile in range(num_tiles(num_columns, RESULTS, OWN)):
        number, begin = place_tile(tile, num_columns, OWN, shape.experts)
        for index in range(shape.summed):
            if shape.experts > 0:
                expert = gl.load(operands.ids + number * shape.summed + index)
            for turn in range(STEPS):
                stage, filled = claim_stage(pipe.ring, step, matrix.block_type.nbytes, shape.stages)
                k = turn * ATOMS
                at = [k, expert, 0, begin, 0] if shape.experts > 0 else [k, 0, begin, 0]
                tma.async_copy_global_to_shared(matrix, at, filled, pipe.weights.index(stage))
                step += 1


@gluon.jit
def _multiply(pipe, rows, parts, operands, out, num_columns, stride_out, eps, shape):
    """Multiply all tiles and store the results."""
    OWN: gl.constexpr = _ROWS // shape.halves
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    # Rows of the result: 1, for gate and up the chosen pairs, for down tokens.
    RESULTS: gl.constexpr = shape.tokens * shape.chosen // shape.summed
    ATOM: gl.constexpr = _ATOM_BITS // pipe.weights.dtype.primitive_bitwidth
    X_STEPS: gl.constexpr = _x_steps(shape.size, shape.summed, shape.blocks, ATOM)
    OF_TOKEN: gl.constexpr = X_STEPS * _X_STEP // (_WARPS * ATOM)
    ROW: gl.constexpr = shape.summed * shape.size
    norms = ()
    if shape.norm:
        # The model's own weight, which no kernel writes: no need to wait.
        norms = load_row(operands.norm, X_STEPS, ROW)
    gdc_wait()
    afters = ()
    for index in gl.static_range(shape.tokens):
        xs = load_row(operands.x + index * ROW, X_STEPS, ROW)
        afters = afters + (keep_row(rows, index * X_STEPS, xs, norms, eps, shape),)  # noqa: RUF005
    planes = rows._reinterpret(rows.dtype, [shape.tokens * OF_TOKEN, _WARPS, ATOM], _PLAIN)
    step = 0
    for tile in range(num_tiles(num_columns, RESULTS, OWN)):
        number, begin = place_tile(tile, num_columns, OWN, shape.experts)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        plane = 0
        after = afters[0]
        if shape.experts > 0:
            token = number * shape.summed // shape.chosen
            plane = token * OF_TOKEN
            for index in gl.static_range(1, shape.tokens):
                after = gl.where(token == index, afters[index], after)
        out_at = out + number * stride_out
        # These loads overlap with the products; the epilogue needs them.
        scale = load_row_scales(operands, column, num_columns, shape)
        bias, old = load_epilogue(operands, out_at, column, num_columns, shape)
        total, step = _sum_rows(
            pipe, planes, plane, operands, number * shape.summed, begin, step, num_columns, shape
        )
        # All 8 columns are equal.
        parts.store(gl.sum(total, 2) * 0.125)
        store_tile(parts, scale, bias, old, after, out_at, column, inside, shape, OUT)


@gluon.jit
def _sum_rows(pipe, planes, plane, operands, pair, begin, step, num_columns, shape):
    """Return each warp's sums of a tile, [W, rows, 8] float32, and the step after its last one.

    Args:
        plane: the first plane of the token's x.
        pair: the tile's first pair of a token and an expert.
        begin: the tile's first column.
    """
    ATOM: gl.constexpr = planes.shape[2]
    OF_PAIR: gl.constexpr = shape.size // (_WARPS * ATOM)
    STEPS: gl.constexpr = ceil_div(shape.size, shape.blocks * _WARPS * ATOM)
    IS_TILED: gl.constexpr = shape.height > 0 and shape.width < shape.size
    OWN: gl.constexpr = _ROWS // shape.halves
    of_tile = gl.arange(0, _ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    row = gl.minimum(begin + of_tile % OWN, num_columns - 1) + of_tile // OWN * num_columns
    factors = ()
    for index in gl.static_range(shape.summed):
        factors = factors + (load_factor(operands, pair + index, row, num_columns, shape),)  # noqa: RUF005
    total = gl.zeros([_WARPS, _ROWS, 8], gl.float32, SUMS)
    for index in gl.static_range(shape.summed):
        sums = ()
        for _ in gl.static_range(shape.blocks):
            sums = sums + (gl.zeros([_WARPS, _ROWS, 8], gl.float32, SUMS),)  # noqa: RUF005
        at = plane + index * OF_PAIR
        if IS_TILED and shape.experts > 0:
            # Experts' rows are so short that all of their scales can be loaded before the products.
            scales_at = first_scales(operands, pair + index, row, num_columns, shape)
            ratios = load_ratios(scales_at, 0, STEPS * shape.blocks, num_columns, ATOM, shape)
            for turn in gl.static_range(STEPS):
                of_step = ratios[turn * shape.blocks : (turn + 1) * shape.blocks]
                sums = _add_step(sums, of_step, pipe, planes, at + turn * shape.blocks, step, shape)
                step += 1
        else:
            for turn in range(STEPS):
                first = turn * shape.blocks
                ratios = ()
                if IS_TILED:
                    scales_at = first_scales(operands, pair, row, num_columns, shape)
                    ratios = load_ratios(scales_at, first, shape.blocks, num_columns, ATOM, shape)
                sums = _add_step(sums, ratios, pipe, planes, at + first, step, shape)
                step += 1
        whole = sums[0]
        for block in gl.static_range(1, shape.blocks):
            whole += sums[block]
        total = whole if shape.experts == 0 else total + whole * factors[index]
    return total, step


@gluon.jit
def _add_step(sums, ratios, pipe, planes, plane, step, shape):
    """Add a step's products to the sums of a warp's blocks, which do not wait for one another.

    Args:
        sums: [W, rows, 8] float32 of each block.
        ratios: factors of each block's products, [W, rows, 1]; or ().
        pipe: weights in stages, and their ring.
        planes: x, [planes, W, atom] in shared memory.
        plane: the first block's.
        step: the pipe's.
        shape: see Shape.
    """
    KIND: gl.constexpr = pipe.weights.dtype
    EACH: gl.constexpr = 128 // KIND.primitive_bitwidth
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, EACH)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, EACH)
    ATOM: gl.constexpr = planes.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=_ATOM_BITS // 8, element_bitwidth=KIND.primitive_bitwidth, rank=3
    )
    stage = wait_for_stage(pipe.ring, step, shape.stages)
    atoms = pipe.weights.index(stage)._reinterpret(KIND, [shape.blocks, _WARPS, _ROWS, ATOM], LAYOUT)
    weights = ()
    for block in gl.static_range(shape.blocks):
        weights = weights + (atoms.index(block).load(A),)  # noqa: RUF005
    free_stage(pipe.ring, stage)
    added = ()
    for block in gl.static_range(shape.blocks):
        x = planes.index(plane + block).load(gl.SliceLayout(2, B))
        x = gl.expand_dims(x, 2).broadcast_to([_WARPS, ATOM, 8])
        weight = weights[block].to(planes.dtype)
        if len(ratios) > 0:
            products = mma_v2(weight, x, gl.zeros([_WARPS, _ROWS, 8], gl.float32, SUMS))
            added = added + (sums[block] + products * ratios[block],)  # noqa: RUF005
        else:
            added = added + (mma_v2(weight, x, sums[block]),)  # noqa: RUF005
    return added
