"""The kernel of 1 to 4 tokens' experts in floats: the GEMV's pipeline (dense_gemv_kernel).

    gate and up    a tile is 8 columns of gate and of up, of one of a token's experts
    down           a tile is 16 columns of a token's sum: rows of each of its experts, one after the other

Which experts these are is the first that a program reads after the kernel before; then weights come by TMA.
What a rank does not hold lies outside of the tensor, and reads as zero.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemv_kernel import add_step, ceil_div
from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, X_STEP
from octavo.gemm.hopper.floats.expert_tiles import num_expert_tiles, place_tile
from octavo.gemm.hopper.floats.gemv_row import keep_row, load_row
from octavo.kernels.activation import gate_and_up
from octavo.kernels.ring import claim_stage, make_ring

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_X_STEP = gl.constexpr(X_STEP)
_ATOM_BITS = gl.constexpr(8 * ATOM_BYTES)
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A tile's products, [W, rows, 8].
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8]))


class Shape(NamedTuple):
    """Sizes, tiling and what is fused, all constants of the kernel.

    Attributes:
        size: K.
        held: E.
        chosen: k.
        summed: experts that a tile adds up: 1 of gate and up, k of down.
        tokens: T.
        blocks, x_steps, stages: see FloatTiling.
        activation: of gate and up, None for down.
        adds: whether the result is added to the residual.
        width: numbers of a row that share a scale; 0: there are no scales.
    """

    size: Any
    held: Any
    chosen: Any
    summed: Any
    tokens: Any
    blocks: Any
    x_steps: Any
    stages: Any
    activation: Any
    adds: Any
    width: Any


class RowShape(NamedTuple):
    """What linear.gemv.row asks of a token's rows of x, which follow one another.

    Attributes:
        size: numbers of them all.
        norm: False.
        height: 0 if they stay as they are, else they become float16.
    """

    size: Any
    norm: Any
    height: Any


class Operands(NamedTuple):
    """Pointers beside the weight: x [T, K] or [T k, K], scales [E, K / width, N], the choice [T, k] each."""

    x: Any
    scales: Any
    experts: Any
    factors: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring."""

    weights: Any
    ring: Any


@gluon.jit(do_not_specialize=["num_columns", "stride_out"])
def float_gemv_kernel(matrix, operands, out, num_columns, stride_out, shape, row_shape):
    """Grid: any number of programs, which take tiles in turn.

    Args:
        matrix: the weight as TMA sees it, [K in atoms, E, halves, N / halves, atom].
        operands: see there.
        out: of gate and up [T k, n]; of down [T, N], the residual if the result is added to it.
        num_columns: n or N.
        stride_out: between rows of out.
        shape, row_shape: see there.
    """
    DTYPE: gl.constexpr = matrix.dtype if shape.width == 0 else gl.float16
    gdc_launch_dependents()
    pipe = _Pipe(
        gl.allocate_shared_memory(matrix.dtype, [shape.stages] + matrix.block_type.shape, matrix.layout),  # noqa: RUF005
        make_ring(shape.stages),
    )
    rows = gl.allocate_shared_memory(DTYPE, [shape.tokens * shape.x_steps, _X_STEP], _FLAT)
    parts = gl.allocate_shared_memory(gl.float32, [_WARPS, _ROWS], _PLAIN)
    gl.warp_specialize(
        [
            (_multiply, (pipe, rows, parts, operands, out, num_columns, stride_out, shape, row_shape)),
            (_fetch, (matrix, pipe, operands, num_columns, shape)),
        ],
        [1],
        [40],
    )


@gluon.constexpr_function
def _own_columns(activation):
    """Return the columns of a tile."""
    return TILE_ROWS if activation is None else TILE_ROWS // 2


@gluon.jit
def _num_results(shape):
    """Return how many rows the result has: pairs, or for down tokens."""
    return shape.tokens * shape.chosen // shape.summed


@gluon.jit
def _fetch(matrix, pipe, operands, num_columns, shape):
    """Fetch all steps of all tiles; what lies past the ends, or is of no expert here, reads as zero."""
    OWN: gl.constexpr = _own_columns(shape.activation)
    ATOMS: gl.constexpr = shape.blocks * _WARPS
    STEPS: gl.constexpr = ceil_div(shape.size, ATOMS * matrix.block_type.shape[4])
    gdc_wait()
    step = 0
    for tile in range(num_expert_tiles(num_columns, _num_results(shape), OWN)):
        number, begin = place_tile(tile, num_columns, OWN)
        for index in range(shape.summed):
            expert = gl.load(operands.experts + number * shape.summed + index)
            for turn in range(STEPS):
                stage, filled = claim_stage(pipe.ring, step, matrix.block_type.nbytes, shape.stages)
                at = [turn * ATOMS, expert, 0, begin, 0]
                tma.async_copy_global_to_shared(matrix, at, filled, pipe.weights.index(stage))
                step += 1


@gluon.jit
def _multiply(pipe, rows, parts, operands, out, num_columns, stride_out, shape, row_shape):
    """Multiply all tiles and store the results."""
    OWN: gl.constexpr = _own_columns(shape.activation)
    OUT: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([_WARPS, 1], [1, 32], [1, _WARPS], [1, 0]))
    ATOM: gl.constexpr = _ATOM_BITS // pipe.weights.dtype.primitive_bitwidth
    OF_TOKEN: gl.constexpr = shape.x_steps * _X_STEP // (_WARPS * ATOM)
    gdc_wait()
    afters = ()
    for index in gl.static_range(shape.tokens):
        xs = load_row(operands.x + index * row_shape.size, shape.x_steps, row_shape)
        afters = afters + (keep_row(rows, index * shape.x_steps, xs, (), 0.0, row_shape),)  # noqa: RUF005
    planes = rows._reinterpret(rows.dtype, [shape.tokens * OF_TOKEN, _WARPS, ATOM], _PLAIN)
    step = 0
    for tile in range(num_expert_tiles(num_columns, _num_results(shape), OWN)):
        number, begin = place_tile(tile, num_columns, OWN)
        token = number * shape.summed // shape.chosen
        column = begin + gl.arange(0, OWN, OUT)
        inside = column < num_columns
        after = afters[0]
        for index in gl.static_range(1, shape.tokens):
            after = gl.where(token == index, afters[index], after)
        # Loaded now, needed after the products.
        old = 0.0
        if shape.adds:
            old = gl.load(out + number * stride_out + column, mask=inside, other=0.0).to(gl.float32)
        total, step = _sum_pairs(
            pipe, planes, token * OF_TOKEN, operands, number * shape.summed, begin, step, num_columns, shape
        )
        # All 8 columns are the same.
        parts.store(gl.sum(total, 2) * 0.125)
        result = gl.sum(parts.slice(0, OWN, 1).load(OUT.parent), 0) * after
        if shape.activation is not None:
            up = gl.sum(parts.slice(OWN, OWN, 1).load(OUT.parent), 0) * after
            result = gate_and_up(result, up, shape.activation)
        gl.store(out + number * stride_out + column, (result + old).to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _sum_pairs(pipe, planes, plane, operands, first, begin, step, num_columns, shape):
    """Return each warp's sums of a tile, [W, rows, 8] float32, and the step after its last one.

    Args:
        plane: of the token's x, the first.
        first: pair of the tile.
        begin: column of the tile.
    """
    ATOM: gl.constexpr = planes.shape[2]
    OF_PAIR: gl.constexpr = shape.size // (_WARPS * ATOM)
    STEPS: gl.constexpr = ceil_div(OF_PAIR, shape.blocks)
    row = _rows_of_tile(begin, num_columns, shape)
    factors = ()
    for index in gl.static_range(shape.summed):
        factors = factors + (_load_factor(operands, first + index, row, num_columns, shape),)  # noqa: RUF005
    total = gl.zeros([_WARPS, _ROWS, 8], gl.float32, _SUMS)
    for index in gl.static_range(shape.summed):
        ratios = _load_ratios(operands, first + index, row, num_columns, ATOM, shape)
        sums = ()
        for _ in gl.static_range(shape.blocks):
            sums = sums + (gl.zeros([_WARPS, _ROWS, 8], gl.float32, _SUMS),)  # noqa: RUF005
        at = plane + index * OF_PAIR
        if len(ratios) > 0:
            for turn in gl.static_range(STEPS):
                of_step = ratios[turn * shape.blocks : (turn + 1) * shape.blocks]
                sums = add_step(sums, of_step, pipe, planes, at + turn * shape.blocks, step, shape, _SUMS)
                step += 1
        else:
            for turn in range(STEPS):
                sums = add_step(sums, (), pipe, planes, at + turn * shape.blocks, step, shape, _SUMS)
                step += 1
        whole = sums[0]
        for block in gl.static_range(1, shape.blocks):
            whole += sums[block]
        total += whole * factors[index]
    return total, step


@gluon.jit
def _rows_of_tile(begin, num_columns, shape):
    """Return the rows of an expert's weight that a tile has, [1, rows, 1]."""
    OWN: gl.constexpr = _own_columns(shape.activation)
    index = gl.arange(0, _ROWS, gl.SliceLayout(0, gl.SliceLayout(2, _SUMS)))[None, :, None]
    return gl.minimum(begin + index % OWN, num_columns - 1) + index // OWN * num_columns


@gluon.jit
def _scales_at(operands, pair, row, num_columns, shape):
    """Return pointers to the first scales of rows of a pair's expert; of any if it is not here."""
    HALVES: gl.constexpr = _ROWS // _own_columns(shape.activation)
    PARTS: gl.constexpr = ceil_div(shape.size, shape.width)
    expert = gl.minimum(gl.load(operands.experts + pair), shape.held - 1)
    return operands.scales + expert * (PARTS * HALVES) * num_columns + row


@gluon.jit
def _load_factor(operands, pair, row, num_columns, shape):
    """Load what all products of a pair are to be multiplied by, a number or [1, rows, 1]."""
    factor = 1.0
    if shape.activation is None:
        factor = gl.load(operands.factors + pair)
    if shape.width >= shape.size:
        factor *= gl.load(_scales_at(operands, pair, row, num_columns, shape))
    return factor


@gluon.jit
def _load_ratios(operands, pair, row, num_columns, ATOM: gl.constexpr, shape):
    """Load the scales of a warp's atoms, a tuple of [W, rows, 1], if a row of the weight has several."""
    ratios = ()
    if shape.width > 0 and shape.width < shape.size:
        HALVES: gl.constexpr = _ROWS // _own_columns(shape.activation)
        PARTS: gl.constexpr = ceil_div(shape.size, shape.width)
        STEPS: gl.constexpr = ceil_div(shape.size, shape.blocks * _WARPS * ATOM)
        at = _scales_at(operands, pair, row, num_columns, shape)
        warp = gl.arange(0, _WARPS, gl.SliceLayout(1, gl.SliceLayout(2, _SUMS)))[:, None, None]
        for block in gl.static_range(STEPS * shape.blocks):
            part = gl.minimum((block * _WARPS + warp) * ATOM // shape.width, PARTS - 1)
            ratios = ratios + (gl.load(at + part * (HALVES * num_columns)),)  # noqa: RUF005
    return ratios
