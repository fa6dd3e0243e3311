"""The kernel of hopper_linear: one warp fetches by TMA, a warpgroup multiplies on tensor cores.

    TMA warp (_fetch)                              warpgroup of 4 warps (_multiply, _sum_tiles)

    weights of the first tiles --> weights         wait for the kernel before
    wait for the kernel before                     load the residual and the bias
    for each tile of K:                            for each tile of K:
      wait free[row stage]                           wait weights_filled[weight stage]
      rows of x --> rows                             wait rows_filled[row stage]
      weights of a later tile --> weights            wgmma: sums += rows x weights
                                                     the tile before is done: arrive free[its row stage]
                                                   epilogue, store

Shared memory; a stage holds one tile of K as `atoms` side by side, each 128 bytes wide, 64 or 128 values:

    rows            | stage 0: atoms x [rows, 64] | stage 1 | ... | spare: 64 / rows - 1 atoms
    weights         | stage 0: atoms x [halves, columns, 64] | stage 1 | ...
    rows_filled     | one mbarrier per row stage      TMA has written the rows
    weights_filled  | one mbarrier per weight stage   TMA has written the weights
    free            | one mbarrier per row stage      the warpgroup has read rows and weights of a tile

Weights have at least as many stages as rows. By the time TMA may write tile t's rows, tile t - row stages has
been multiplied: its weights' buffer is free as well, and gets tile t - row stages + weight stages.

Float8 tensor cores do not accumulate in full float32: the products of each atom are summed on their own,
scaled if the weight's tiles are as narrow as atoms, and then added up (_sum_float8_tiles).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.gemm.hopper.floats.dense_gemm_tiling import GROUP_ROWS
from octavo.kernels.activation import activate
from octavo.kernels.ring import steps_in_flight

# Bits in a row of an atom, and rows of a wgmma.
_ATOM_BITS = gl.constexpr(1024)
_GROUP = gl.constexpr(GROUP_ROWS)


class Shape(NamedTuple):
    """Tiling and epilogue, all constants of the kernel.

    Attributes:
        rows: rows of x per program.
        halves: 2 with an activation, which needs a column of gate and one of up, else 1.
        columns: columns of the result per program.
        atoms: atoms, of 128 bytes along K, per stage.
        weight_stages: buffers for weights.
        row_stages: buffers for rows.
        activation: name or None.
        adds: whether the result is added to the residual.
        tiled: whether scales of the weight are for atoms; False: for rows.
    """

    rows: Any
    halves: Any
    columns: Any
    atoms: Any
    weight_stages: Any
    row_stages: Any
    activation: Any
    adds: Any
    tiled: Any


class _Pipe(NamedTuple):
    """Buffers in shared memory and their barriers, as drawn above."""

    rows: Any
    weights: Any
    rows_filled: Any
    weights_filled: Any
    free: Any


class Result(NamedTuple):
    """Where results go: row r begins at out + r * stride. bias may be None."""

    out: Any
    stride: Any
    num_columns: Any
    bias: Any


class Scales(NamedTuple):
    """Scales of float8 operands; row_scales is None for others.

    Attributes:
        row_scales: one for each row of x.
        tile_scales: one for each tile of the weight, [tiles along N, num_side].
        height: rows of a tile.
        num_side: tiles along K: 1, or as many as K has atoms.
    """

    row_scales: Any
    tile_scales: Any
    height: Any
    num_side: Any


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def dense_gemm_kernel(x_matrix, weight_matrix, result, scales, num_rows, num_tiles, shape):
    """Grid: (tiles of columns, tiles of rows). The next kernel starts once all programs are on an SM."""
    gdc_launch_dependents()
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ATOMS: gl.constexpr = shape.atoms
    ATOM: gl.constexpr = _ATOM_BITS // x_matrix.dtype.primitive_bitwidth
    # A wgmma reads 64 rows: an atom's own, then those of the next atoms or spare ones, which are not stored.
    ROW_TILES: gl.constexpr = shape.row_stages * ATOMS + _GROUP // shape.rows - 1
    pipe = _Pipe(
        gl.allocate_shared_memory(x_matrix.dtype, [ROW_TILES, shape.rows, ATOM], x_matrix.layout),
        gl.allocate_shared_memory(
            weight_matrix.dtype,
            [shape.weight_stages * ATOMS, shape.halves, shape.columns, ATOM],
            weight_matrix.layout,
        ),
        gl.allocate_shared_memory(gl.int64, [shape.row_stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [shape.weight_stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [shape.row_stages, 1], BARRIER),
    )
    for stage in gl.static_range(shape.weight_stages):
        mbarrier.init(pipe.weights_filled.index(stage), count=1)
        if stage < shape.row_stages:
            mbarrier.init(pipe.rows_filled.index(stage), count=1)
            mbarrier.init(pipe.free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (pipe, result, scales, num_rows, num_tiles, shape)),
            (_fetch, (x_matrix, weight_matrix, pipe, num_tiles, shape)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(x_matrix, weight_matrix, pipe, num_tiles, shape):
    """Fetch as many weights as fit, a few in flight; after the previous kernel, rows and more weights."""
    AHEAD: gl.constexpr = steps_in_flight(weight_matrix.block_type.nbytes * shape.atoms)
    for tile in range(0, gl.minimum(num_tiles, shape.weight_stages)):
        if tile >= AHEAD:
            mbarrier.wait(pipe.weights_filled.index(tile - AHEAD), 0)
        _fetch_weights(weight_matrix, pipe, tile, shape)
    gdc_wait()
    row = gl.program_id(1) * shape.rows
    ATOM: gl.constexpr = _ATOM_BITS // x_matrix.dtype.primitive_bitwidth
    for tile in range(0, num_tiles):
        stage = tile % shape.row_stages
        mbarrier.wait(pipe.free.index(stage), (tile // shape.row_stages + 1) & 1)
        filled = pipe.rows_filled.index(stage)
        mbarrier.expect(filled, x_matrix.block_type.nbytes * shape.atoms)
        for atom in gl.static_range(shape.atoms):
            at = [row, (tile * shape.atoms + atom) * ATOM]
            tma.async_copy_global_to_shared(x_matrix, at, filled, pipe.rows.index(stage * shape.atoms + atom))
        # The tile that freed these rows has freed its weights too.
        ahead = tile - shape.row_stages + shape.weight_stages
        if (tile >= shape.row_stages) & (ahead < num_tiles):
            _fetch_weights(weight_matrix, pipe, ahead, shape)


@gluon.jit
def _fetch_weights(weight_matrix, pipe, tile, shape):
    """Fetch one stage of weights."""
    stage = tile % shape.weight_stages
    filled = pipe.weights_filled.index(stage)
    mbarrier.expect(filled, weight_matrix.block_type.nbytes * shape.atoms)
    ATOM: gl.constexpr = _ATOM_BITS // weight_matrix.dtype.primitive_bitwidth
    for atom in gl.static_range(shape.atoms):
        at = [0, gl.program_id(0) * shape.columns, (tile * shape.atoms + atom) * ATOM]
        buffer = pipe.weights.index(stage * shape.atoms + atom)
        tma.async_copy_global_to_shared(weight_matrix, at, filled, buffer)


@gluon.jit
def _multiply(pipe, result, scales, num_rows, num_tiles, shape):
    """Multiply all tiles, apply the epilogue, store the results."""
    WIDTH: gl.constexpr = shape.halves * shape.columns
    # A wgmma takes 32 bytes of K.
    STEP: gl.constexpr = 256 // pipe.rows.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, STEP])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.columns, STEP])
    gdc_wait()
    index = gl.arange(0, _GROUP, layout=gl.SliceLayout(1, OUT))
    row = gl.program_id(1) * shape.rows + index
    column = gl.program_id(0) * shape.columns + gl.arange(0, shape.columns, layout=gl.SliceLayout(0, OUT))
    has_row = (index < shape.rows) & (row < num_rows)
    inside = has_row[:, None] & (column < result.num_columns)[None, :]
    out_at = result.out + row.to(gl.int64)[:, None] * result.stride + column[None, :]
    # These loads overlap with the products; the epilogue needs them.
    if shape.adds:
        old = gl.load(out_at, mask=inside, other=0.0)
    bias = result.bias
    if bias is not None:
        has_column = column < result.num_columns
        bias = gl.load(result.bias + column, mask=has_column, other=0.0)
        if shape.halves == 2:
            up_bias = gl.load(result.bias + result.num_columns + column, mask=has_column, other=0.0)

    if scales.row_scales is None:
        sums = _sum_tiles(pipe, num_tiles, shape, LAYOUT)
    else:
        row_scale = gl.load(scales.row_scales + row, mask=has_row, other=0.0)
        sums = _sum_float8_tiles(pipe, result, scales, num_tiles, shape, LAYOUT)
    if shape.halves == 2:
        gate, up = sums.reshape([_GROUP, 2, shape.columns]).permute([0, 2, 1]).split()
        gate, up = gl.convert_layout(gate, OUT), gl.convert_layout(up, OUT)
        if scales.row_scales is not None:
            gate *= row_scale[:, None]
            up *= row_scale[:, None]
        if bias is not None:
            gate += bias.to(gl.float32)[None, :]
            up += up_bias.to(gl.float32)[None, :]
        sums = activate(gate, shape.activation) * up
    else:
        if scales.row_scales is not None:
            sums *= row_scale[:, None]
        if bias is not None:
            sums += bias.to(gl.float32)[None, :]
    if shape.adds:
        sums += old.to(gl.float32)
    gl.store(out_at, sums.to(result.out.dtype.element_ty), mask=inside)


@gluon.jit
def _wait_for_tile(pipe, tile, shape):
    """Wait until TMA has written a tile; return the stages of its rows and weights."""
    row_stage, weight_stage = tile % shape.row_stages, tile % shape.weight_stages
    mbarrier.wait(pipe.weights_filled.index(weight_stage), (tile // shape.weight_stages) & 1)
    mbarrier.wait(pipe.rows_filled.index(row_stage), (tile // shape.row_stages) & 1)
    return row_stage, weight_stage


@gluon.jit
def _sum_tiles(pipe, num_tiles, shape, LAYOUT: gl.constexpr):
    """Return rows x weights over all of K: [64, WIDTH] float32."""
    WIDTH: gl.constexpr = shape.halves * shape.columns
    BITS: gl.constexpr = pipe.rows.dtype.primitive_bitwidth
    ATOM: gl.constexpr = _ATOM_BITS // BITS
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    sums = gl.zeros([_GROUP, WIDTH], gl.float32, layout=LAYOUT)
    for tile in range(0, num_tiles):
        row_stage, weight_stage = _wait_for_tile(pipe, tile, shape)
        for atom in gl.static_range(shape.atoms):
            x = pipe.rows.index(row_stage * shape.atoms + atom)
            weight = pipe.weights.index(weight_stage * shape.atoms + atom)
            x = x._reinterpret(x.dtype, [_GROUP, ATOM], TILE)
            weight = weight._reinterpret(weight.dtype, [WIDTH, ATOM], TILE)
            sums = warpgroup_mma(x, weight.permute((1, 0)), sums, is_async=True)
        # Wait for the wgmmas of the previous tile; those of this tile stay in flight.
        sums = warpgroup_mma_wait(shape.atoms, deps=(sums,))
        before = gl.maximum(tile - 1, 0) % shape.row_stages
        mbarrier.arrive(pipe.free.index(before), count=1, pred=tile > 0)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def _sum_float8_tiles(pipe, result, scales, num_tiles, shape, LAYOUT: gl.constexpr):
    """Return rows x weights over all of K, times the weight's scales: [64, WIDTH] float32."""
    WIDTH: gl.constexpr = shape.halves * shape.columns
    ATOM: gl.constexpr = _ATOM_BITS // 8
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    index = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    column = gl.program_id(0) * shape.columns + index % shape.columns
    # Columns past the end repeat the last one and are not stored.
    column = gl.minimum(column, result.num_columns - 1) + index // shape.columns * result.num_columns
    scale_at = scales.tile_scales + column // scales.height * scales.num_side
    scale = gl.load(scale_at)
    zeros = gl.zeros([_GROUP, WIDTH], gl.float32, layout=LAYOUT)
    sums = zeros
    for tile in range(0, num_tiles):
        row_stage, weight_stage = _wait_for_tile(pipe, tile, shape)
        for atom in gl.static_range(shape.atoms):
            x = pipe.rows.index(row_stage * shape.atoms + atom)
            weight = pipe.weights.index(weight_stage * shape.atoms + atom)
            x = x._reinterpret(x.dtype, [_GROUP, ATOM], TILE)
            weight = weight._reinterpret(weight.dtype, [WIDTH, ATOM], TILE)
            products = warpgroup_mma(x, weight.permute((1, 0)), zeros, use_acc=False, is_async=True)
            if shape.tiled:
                # The next atom's scale is loaded meanwhile; the last stage may hold atoms beyond K.
                next_scale = gl.load(
                    scale_at + gl.minimum(tile * shape.atoms + atom + 1, scales.num_side - 1)
                )
            products = warpgroup_mma_wait(0, deps=(products,))
            if shape.tiled:
                sums += products * scale[None, :]
                scale = next_scale
            else:
                sums += products
        mbarrier.arrive(pipe.free.index(row_stage), count=1)
    if not shape.tiled:
        sums *= scale[None, :]
    return sums
