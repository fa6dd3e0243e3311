"""The kernel of gemv_linear: one warp fetches weights by TMA, four multiply them on tensor cores.

    TMA warp (_fetch)                         warps that multiply (_multiply)

    for each tile of 16 rows of the weight:   wait for the kernel before
      for each step along K:                  the row x, normed: to shared memory
        wait free[stage]                      for each tile:
        atoms of all warps -> weights[stage]    for each step:
                                                  wait filled[stage]
                                                  read the warp's atoms; arrive free[stage]
                                                  sums += atoms * x
                                                add up the warps' sums, epilogue, store

Weights never wait for the kernel before. A program takes half of an SM, so while one runs, the next kernel's
program fills its stages beside it. Shared memory of a stage, which a TMA copy writes:

    blocks x warps atoms | 16 rows (gate and up: 8 + 8) | 64 bytes of K, chunks of 16 bytes swizzled

Block b of warp w is the atom b * W + w. A thread reads 16 bytes of two rows, as an operand of `mma`: eight or
sixteen neighbours of K. So x is read by such neighbours, too. Tensor cores want 8 columns: x is repeated.

Float8 weights become float16, which holds them exactly, and x becomes numbers that float16 holds (row.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, X_STEP
from octavo.gemm.hopper.floats.gemv_row import keep_row, load_row
from octavo.kernels.activation import activate
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
        height: rows of the weight that share a scale; 0: there are no scales.
        width: numbers of a row that share a scale.
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


class Operands(NamedTuple):
    """Pointers beside the weight: x [K], its norm's weight, scales, the weight's bias or None."""

    x: Any
    norm: Any
    scales: Any
    bias: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring."""

    weights: Any
    ring: Any


@gluon.jit(do_not_specialize=["num_columns"])
def gemv_kernel(matrix, operands, out, num_columns, eps, shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        matrix: the weight as TMA sees it, [K in atoms, halves, rows of a half, atom].
        operands: see there.
        out: [num_columns], the residual if the result is added to it.
        num_columns: of the result.
        eps: of the norm.
        shape: see there.
    """
    DTYPE: gl.constexpr = matrix.dtype if shape.height == 0 else gl.float16
    ATOM: gl.constexpr = _ATOM_BITS // matrix.dtype.primitive_bitwidth
    STEP: gl.constexpr = shape.blocks * _WARPS * ATOM
    X_STEPS: gl.constexpr = ceil_div(ceil_div(shape.size, STEP) * STEP, _X_STEP)
    gdc_launch_dependents()
    pipe = _Pipe(
        gl.allocate_shared_memory(
            matrix.dtype,
            [shape.stages, shape.blocks * _WARPS, shape.halves, _ROWS // shape.halves, ATOM],
            matrix.layout,
        ),
        make_ring(shape.stages),
    )
    row = gl.allocate_shared_memory(DTYPE, [X_STEPS, _X_STEP], _FLAT)
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], _PLAIN)
    gl.warp_specialize(
        [
            (_multiply, (pipe, row, parts, operands, out, num_columns, eps, shape)),
            (_fetch, (matrix, pipe, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.constexpr_function
def ceil_div(a, b):
    return -(-a // b)


@gluon.jit
def num_tiles(num_columns, shape):
    """Return how many tiles this program takes."""
    OWN: gl.constexpr = _ROWS // shape.halves
    programs = gl.num_programs(0)
    return gl.cdiv(gl.cdiv(num_columns, OWN) - gl.program_id(0), programs)


@gluon.jit
def first_column(tile, shape):
    """Return the first column of this program's tile."""
    return (gl.program_id(0) + tile * gl.num_programs(0)) * (_ROWS // shape.halves)


@gluon.jit
def _fetch(matrix, pipe, num_columns, shape):
    """Fetch all steps of all tiles; what lies past the ends reads as zero."""
    ATOM: gl.constexpr = matrix.block_type.shape[3]
    ATOMS: gl.constexpr = shape.blocks * _WARPS
    STEPS: gl.constexpr = ceil_div(shape.size, ATOMS * ATOM)
    step = 0
    for tile in range(num_tiles(num_columns, shape)):
        begin = first_column(tile, shape)
        for turn in range(STEPS):
            stage, filled = claim_stage(pipe.ring, step, matrix.block_type.nbytes, shape.stages)
            at = [turn * ATOMS, 0, begin, 0]
            tma.async_copy_global_to_shared(matrix, at, filled, pipe.weights.index(stage))
            step += 1


@gluon.jit
def _multiply(pipe, row, parts, operands, out, num_columns, eps, shape):
    """Multiply all tiles and store the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [_WARPS, 1, 1], [1, 16, 8])
    OWN: gl.constexpr = _ROWS // shape.halves
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    ATOM: gl.constexpr = _ATOM_BITS // pipe.weights.dtype.primitive_bitwidth
    PLANES: gl.constexpr = row.shape[0] * _X_STEP // (_WARPS * ATOM)
    STEPS: gl.constexpr = ceil_div(shape.size, shape.blocks * _WARPS * ATOM)
    # It is part of the model, so it need not wait.
    norms = ()
    if shape.norm:
        norms = load_row(operands.norm, row.shape[0], shape)
    gdc_wait()
    after = keep_row(row, 0, load_row(operands.x, row.shape[0], shape), norms, eps, shape)
    planes = row._reinterpret(row.dtype, [PLANES, _WARPS, ATOM], _PLAIN)
    step = 0
    for tile in range(num_tiles(num_columns, shape)):
        begin = first_column(tile, shape)
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        # Loaded now, needed after the products.
        scale, bias, old = load_epilogue(operands, out, column, num_columns, shape)
        sums = ()
        for _ in gl.static_range(shape.blocks):
            sums = sums + (gl.zeros([_WARPS, _ROWS, 8], gl.float32, SUMS),)  # noqa: RUF005
        for turn in range(STEPS):
            ratios = _load_ratios(operands, begin, turn, num_columns, ATOM, shape, SUMS)
            sums = add_step(sums, ratios, pipe, planes, turn * shape.blocks, step, shape, SUMS)
            step += 1
        total = sums[0]
        for block in gl.static_range(1, shape.blocks):
            total += sums[block]
        # All 8 columns are the same.
        parts.store(gl.sum(total, 2) * 0.125)
        store_tile(parts, scale, bias, old, after, out, column, inside, shape, OUT)


@gluon.jit
def load_epilogue(operands, out, column, num_columns, shape):
    """Return scales and biases of both halves, and the residual, each 1.0 or 0.0 if there is none."""
    scales = (1.0, 1.0)
    biases = (0.0, 0.0)
    old = 0.0
    column = gl.minimum(column, num_columns - 1)
    if shape.height > 0 and shape.width >= shape.size:
        gate = gl.load(operands.scales + column // shape.height)
        scales = (gate, gate)
        if shape.halves == 2:
            scales = (gate, gl.load(operands.scales + (num_columns + column) // shape.height))
    if operands.bias is not None:
        gate_bias = gl.load(operands.bias + column).to(gl.float32)
        biases = (gate_bias, gate_bias)
        if shape.halves == 2:
            biases = (gate_bias, gl.load(operands.bias + num_columns + column).to(gl.float32))
    if shape.adds:
        old = gl.load(out + column).to(gl.float32)
    return scales, biases, old


@gluon.jit
def add_step(sums, ratios, pipe, planes, plane, step, shape, SUMS: gl.constexpr):
    """Add a step's products to the sums of a warp's blocks, which do not wait for one another.

    Args:
        sums: [W, rows, 8] float32 of each block, of layout SUMS.
        ratios: what products of each block are to be multiplied by, [W, rows, 1]; or ().
        pipe: weights in stages, and their ring.
        planes: x, [planes, W, atom] in shared memory.
        plane: of the first block.
        step: of the pipe.
        shape: has `blocks` and `stages`.
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


@gluon.jit
def _load_ratios(operands, begin, turn, num_columns, ATOM: gl.constexpr, shape, SUMS: gl.constexpr):
    """Load the scales of a step's atoms, a tuple of [W, rows, 1], if tiles are narrower than K."""
    ratios = ()
    if shape.height > 0 and shape.width < shape.size:
        OWN: gl.constexpr = _ROWS // shape.halves
        SIDE: gl.constexpr = ceil_div(shape.size, shape.width)
        warp = gl.arange(0, _WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
        index = gl.arange(0, _ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
        row = gl.minimum(begin + index % OWN, num_columns - 1) + index // OWN * num_columns
        for block in gl.static_range(shape.blocks):
            k = ((turn * shape.blocks + block) * _WARPS + warp) * ATOM
            at = row // shape.height * SIDE + gl.minimum(k // shape.width, SIDE - 1)
            ratios = ratios + (gl.load(operands.scales + at),)  # noqa: RUF005
    return ratios


@gluon.jit
def store_tile(parts, scale, bias, old, after, out, column, inside, shape, OUT: gl.constexpr):
    """Add up the warps' sums of a tile, apply the epilogue, and store the results.

    Args:
        parts: [W, rows] in shared memory.
        scale, bias, old: see load_epilogue.
        after: what the sums are to be multiplied by.
        out: see gemv_kernel.
        column: of the results.
        inside: which of them exist.
        shape: see there.
        OUT: layout of column.
    """
    result = _add_warps(parts, 0, scale[0], bias[0], after, shape, OUT)
    if shape.activation is not None:
        up = _add_warps(parts, _ROWS // shape.halves, scale[1], bias[1], after, shape, OUT)
        result = activate(result, shape.activation) * up
    if shape.adds:
        result += old
    gl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _add_warps(parts, begin: gl.constexpr, scale, bias, after, shape, OUT: gl.constexpr):
    """Return the results of one half of a tile."""
    sums = parts.slice(begin, _ROWS // shape.halves, 1).load(OUT.parent)
    return gl.sum(sums, 0) * after * scale + bias
