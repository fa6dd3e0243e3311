"""The kernel of persistent_gemm: one warp fetches by TMA, two warpgroups multiply on float8 tensor cores.

    TMA warp (_fetch)                          two warpgroups (_multiply)

    weights of the first steps --> stages      wait for the kernel before
    wait for the kernel before                 for each tile:
    for each tile, for each step along K:        for each span of K:
      wait free[stage]                             for each step of it:
      rows, weights --> stage                        wait filled[stage]
                                                     wgmma: products += rows x weights
                                                     the step before is done: arrive free[its stage]
                                                   sums += products
                                                 epilogue; results --> shared memory --> TMA

A tile has 128 rows of x, 64 for each warpgroup, and weights in one part or in two, each as many rows of the
weight as a power of two: 128 + 64 let 128 programs share gate and up of 12,288 columns.

Float8 tensor cores do not accumulate in full float32: they sum only the products of a span.

Shared memory of a stage, a step of 128 columns, and of a tile's results:

    rows      two halves | 64 rows | 128 bytes
    weights   for each part: gate and up | rows of the weight | 128 bytes
    results   for each part: two halves | 64 rows | columns
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

from octavo.gemm.hopper.float8.many_tiling import HALF_ROWS, STEP
from octavo.gemm.hopper.float8.persistent_epilogue import Work, finish, num_tiles, place, prepare, sums_layout
from octavo.kernels.ring import free_stage, make_ring, wait_for_stage, wait_until_free

_HALF = gl.constexpr(HALF_ROWS)
_STEP = gl.constexpr(STEP)


class _Pipe(NamedTuple):
    """Buffers in shared memory, one for each stage, and their ring; extra is None with one part."""

    rows: Any
    weights: Any
    extra: Any
    ring: Any


class _Out(NamedTuple):
    """For each part, the result as TMA sees it, and a tile's results in shared memory."""

    matrices: Any
    staged: Any


@gluon.jit(do_not_specialize=["num_rows", "num_columns", "num_spans"])
def persistent_float8_kernel(
    x_matrix, weight_matrix, extra_matrix, out_matrix, out_extra, result,
    num_rows, num_columns, num_spans, shape,
):  # fmt: skip
    """Grid: any number of programs, which take tiles in turn.

    Args:
        x_matrix: x as TMA sees it, [M, K], tiles of 64 rows and a step.
        weight_matrix, extra_matrix: the weight, [halves, rows of a half, K], in the tiles of each part.
        out_matrix, out_extra: the result, in the tiles of each part; with one part no extra one is read.
        result: see Result.
        num_rows: M.
        num_columns: of the result.
        num_spans: of K.
        shape: see Shape.
    """
    gdc_launch_dependents()
    work = Work(num_rows, num_columns, num_spans)
    DTYPE: gl.constexpr = x_matrix.dtype
    out = _Out((out_matrix,), (_make_staged(out_matrix, shape.columns),))
    extra = None
    if shape.extra > 0:
        out = _Out((out_matrix, out_extra), (out.staged[0], _make_staged(out_extra, shape.extra)))
        extra = gl.allocate_shared_memory(
            DTYPE, [shape.stages, shape.halves, shape.extra, _STEP], extra_matrix.layout
        )
    pipe = _Pipe(
        gl.allocate_shared_memory(DTYPE, [shape.stages * 2, _HALF, _STEP], x_matrix.layout),
        gl.allocate_shared_memory(
            DTYPE, [shape.stages, shape.halves, shape.columns, _STEP], weight_matrix.layout
        ),
        extra,
        make_ring(shape.stages, 2),
    )
    gl.warp_specialize(
        [
            (_multiply_first_half, (pipe, out, result, work, shape)),
            (_multiply_second_half, (pipe, out, result, work, shape)),
            (_fetch, (x_matrix, weight_matrix, extra_matrix, pipe, work, shape)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _make_staged(matrix, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(matrix.dtype, [2, _HALF, COLUMNS], matrix.layout)


@gluon.jit
def _fetch(x_matrix, weight_matrix, extra_matrix, pipe, work, shape):
    """Fetch all steps of all tiles; what lies past the ends of K and of the weight reads as zero."""
    num_steps = work.num_spans * shape.span
    early = gl.minimum(num_steps, shape.stages)
    first = gl.program_id(0)
    last = num_tiles(work, shape)
    if first < last:
        row, column = place(first, work, shape)
        for turn in range(early):
            _fetch_weights(x_matrix, weight_matrix, extra_matrix, pipe, turn, turn, row, column, work, shape)
    gdc_wait()
    step = 0
    for tile in range(first, last, gl.num_programs(0)):
        row, column = place(tile, work, shape)
        for turn in range(num_steps):
            stage = step % shape.stages
            if step >= early:
                wait_until_free(pipe.ring, step, shape.stages)
                _fetch_weights(
                    x_matrix, weight_matrix, extra_matrix, pipe, stage, turn, row, column, work, shape
                )
            filled = pipe.ring.filled.index(stage)
            k = turn * _STEP
            tma.async_copy_global_to_shared(x_matrix, [row, k], filled, pipe.rows.index(stage * 2))
            # A second half past the last row is skipped: TMA is slow at filling missing rows.
            tma.async_copy_global_to_shared(
                x_matrix, [row + _HALF, k], filled, pipe.rows.index(stage * 2 + 1),
                pred=row + _HALF < work.num_rows,
            )  # fmt: skip
            step += 1


@gluon.jit
def _fetch_weights(
    x_matrix, weight_matrix, extra_matrix, pipe, stage, turn, row, column, work, shape
):  # fmt: skip
    """Announce all bytes of a step, and fetch its weights."""
    EXTRA: gl.constexpr = extra_matrix.block_type.nbytes if shape.extra > 0 else 0
    ROWS: gl.constexpr = x_matrix.block_type.nbytes
    WEIGHTS: gl.constexpr = weight_matrix.block_type.nbytes + EXTRA
    filled = pipe.ring.filled.index(stage)
    has_both = row + _HALF < work.num_rows
    mbarrier.expect(filled, WEIGHTS + 2 * ROWS, pred=has_both)
    mbarrier.expect(filled, WEIGHTS + ROWS, pred=row + _HALF >= work.num_rows)
    at = [0, column, turn * _STEP]
    tma.async_copy_global_to_shared(weight_matrix, at, filled, pipe.weights.index(stage))
    if shape.extra > 0:
        at = [0, column + shape.columns, turn * _STEP]
        tma.async_copy_global_to_shared(extra_matrix, at, filled, pipe.extra.index(stage))


@gluon.jit
def _multiply_first_half(pipe, out, result, work, shape):
    _multiply(pipe, out, result, work, shape, 0)


@gluon.jit
def _multiply_second_half(pipe, out, result, work, shape):
    _multiply(pipe, out, result, work, shape, 1)


@gluon.jit
def _multiply(pipe, out, result, work, shape, HALF: gl.constexpr):
    """Multiply a half of the rows of all tiles, apply the epilogue, store the results."""
    gdc_wait()
    step = 0
    for tile in range(gl.program_id(0), num_tiles(work, shape), gl.num_programs(0)):
        row, column = place(tile, work, shape)
        row += HALF * _HALF
        # These loads overlap with the products; the epilogue needs them.
        parts = (prepare(result, row, column, shape.columns, work, shape),)
        if shape.extra > 0:
            second = prepare(result, row, column + shape.columns, shape.extra, work, shape)
            parts = parts + (second,)  # noqa: RUF005
        if shape.tiled:
            sums = _sum_tiled_steps(pipe, step, result, column, work, shape, HALF)
        else:
            sums = _sum_steps(pipe, step, work, shape, HALF)
        # Wait until TMA has read the results of the previous tile.
        tma.store_wait(0)
        for index in gl.static_range(len(parts)):
            begin = column + index * shape.columns
            finish(sums[index], parts[index], out.staged[index].index(HALF), result, begin, work, shape)
        fence_async_shared()
        for index in gl.static_range(len(parts)):
            at = [row, column + index * shape.columns]
            tma.async_copy_shared_to_global(out.matrices[index], at, out.staged[index].index(HALF))
        step += work.num_spans * shape.span
    tma.store_wait(0)


@gluon.jit
def _sum_steps(pipe, step, work, shape, HALF: gl.constexpr):
    """Return rows x weights over all of K, for each part: float32 [64, rows of the weight]."""
    WIDTH: gl.constexpr = shape.halves * shape.columns
    EXTRA: gl.constexpr = shape.halves * shape.extra
    zeros = (gl.zeros([_HALF, WIDTH], gl.float32, sums_layout(WIDTH)),)
    if shape.extra > 0:
        zeros = zeros + (gl.zeros([_HALF, EXTRA], gl.float32, sums_layout(EXTRA)),)  # noqa: RUF005
    sums = zeros
    for _ in range(work.num_spans):
        products = zeros
        for turn in gl.static_range(shape.span):
            stage = wait_for_stage(pipe.ring, step, shape.stages)
            x = pipe.rows.index(stage * 2 + HALF)
            first = warpgroup_mma(
                x, _transposed(pipe.weights, stage, WIDTH), products[0], use_acc=turn > 0, is_async=True
            )
            products = (first,) + products[1:]  # noqa: RUF005
            if shape.extra > 0:
                second = warpgroup_mma(
                    x, _transposed(pipe.extra, stage, EXTRA), products[1], use_acc=turn > 0, is_async=True
                )
                products = (first, second)
            if turn > 0:
                products = _wait(products, 1)
                free_stage(pipe.ring, (step - 1) % shape.stages)
            step += 1
        products = _wait(products, 0)
        free_stage(pipe.ring, (step - 1) % shape.stages)
        added = (sums[0] + products[0],)
        if shape.extra > 0:
            added = added + (sums[1] + products[1],)  # noqa: RUF005
        sums = added
    return sums


@gluon.jit
def _sum_tiled_steps(pipe, step, result, column, work, shape, HALF: gl.constexpr):
    """Return what _sum_steps does, times the scales of the weight's tiles.

    Gate and up, hence each half of a program's tile, must stay within one row of scale tiles.
    """
    WIDTH: gl.constexpr = shape.halves * shape.columns
    LAYOUT: gl.constexpr = sums_layout(WIDTH)
    index = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    gate_at = result.scales + column // _STEP * work.num_spans
    up_at = gate_at
    if shape.halves == 2:
        up_at = result.scales + (work.num_columns + column) // _STEP * work.num_spans
    gate_scale, up_scale = gl.load(gate_at), gl.load(up_at)
    zeros = gl.zeros([_HALF, WIDTH], gl.float32, LAYOUT)
    sums = zeros
    for turn in range(work.num_spans):
        stage = wait_for_stage(pipe.ring, step, shape.stages)
        x = pipe.rows.index(stage * 2 + HALF)
        weights = _transposed(pipe.weights, stage, WIDTH)
        products = warpgroup_mma(x, weights, zeros, use_acc=False, is_async=True)
        scale = gl.where(index < shape.columns, gate_scale, up_scale)[None, :]
        # The scales of the next step are loaded while this one is multiplied.
        ahead = gl.minimum(turn + 1, work.num_spans - 1)
        gate_scale, up_scale = gl.load(gate_at + ahead), gl.load(up_at + ahead)
        products = warpgroup_mma_wait(0, deps=(products,))
        free_stage(pipe.ring, stage)
        sums += products * scale
        step += 1
    return (sums,)


@gluon.jit
def _transposed(buffer, stage, WIDTH: gl.constexpr):
    """Return a stage's weights, [128 columns, rows of the weight]."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return buffer.index(stage)._reinterpret(buffer.dtype, [WIDTH, _STEP], TILE).permute((1, 0))


@gluon.jit
def _wait(products, steps: gl.constexpr):
    """Wait until only the wgmmas of the last `steps` steps are in flight."""
    if len(products) == 1:
        (first,) = products
        first = warpgroup_mma_wait(steps, deps=(first,))
        return (first,)
    else:
        first, second = products
        first, second = warpgroup_mma_wait(2 * steps, deps=(first, second))
        return (first, second)
