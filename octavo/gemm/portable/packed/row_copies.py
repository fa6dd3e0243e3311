"""Copies of words and pairs to shared memory, some steps ahead, for the kernel of few_linear.

A step is a turn of a tile: a span of each warp, of the rows of the weight that a tile has, and its pairs.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


class Work(NamedTuple):
    """What a program multiplies.

    Attributes:
        first: its first column of the result.
        num_columns: columns of the result.
        num_weight_rows: rows of the weight, gate and up counted.
        first_span: first span of its part of K.
        num_steps: steps of all its tiles.
    """

    first: Any
    num_columns: Any
    num_weight_rows: Any
    first_span: Any
    num_steps: Any


class Copies(NamedTuple):
    """What a program copies of the weight, and where to; W warps.

    Attributes:
        words_at: [W, columns, 32], words of the tile at column 0 of the result: of the first turn's spans, if
            all warps of all parts always have one, else of span 0.
        pairs_at: [W * groups of a span, columns], pairs of that tile, likewise.
        span: [W, 1, 1], each warp's span of the first turn.
        group: [W * groups of a span, 1], groups of the first turn.
        words: [stages, W, columns, 32] in shared memory.
        pairs: [stages, W * groups of a span, columns] in shared memory.
    """

    words_at: Any
    pairs_at: Any
    span: Any
    group: Any
    words: Any
    pairs: Any


@gluon.jit
def plan_copies(words_ptr, pairs_ptr, work, shape: gl.constexpr, own: gl.constexpr):
    """Return what to copy; own: a tile's columns of the result."""
    GROUPS: gl.constexpr = 1024 // shape.bits // shape.group
    NUM_SPANS: gl.constexpr = (shape.size * shape.bits + 1023) // 1024
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [shape.warps, 1, 1], [2, 1, 0])
    COPY_PAIRS: gl.constexpr = gl.BlockedLayout(
        [1, 1], [32 // shape.columns, shape.columns], [shape.warps, 1], [1, 0]
    )
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    index = gl.arange(0, shape.columns, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    place = gl.arange(0, shape.warps * GROUPS, gl.SliceLayout(1, COPY_PAIRS))[:, None]
    index_p = gl.arange(0, shape.columns, gl.SliceLayout(0, COPY_PAIRS))[None, :]
    # If the result has fewer columns than a tile, the last one is repeated.
    last = work.num_columns - 1
    weight_row = gl.minimum(index % own, last) + index // own * work.num_columns
    weight_row_p = gl.minimum(index_p % own, last) + index_p // own * work.num_columns
    span = work.first_span + warp
    group = work.first_span * GROUPS + place
    words_at = words_ptr + (weight_row * (NUM_SPANS * 32) + word)
    pairs_at = pairs_ptr + weight_row_p
    if NUM_SPANS % (shape.warps * shape.turns) == 0:
        words_at += span * 32
        pairs_at += group * work.num_weight_rows
    return Copies(
        words_at,
        pairs_at,
        span,
        group,
        gl.allocate_shared_memory(
            gl.int32,
            [shape.stages, shape.warps, shape.columns, 32],
            gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]),
        ),
        gl.allocate_shared_memory(
            gl.int32,
            [shape.stages, shape.warps * GROUPS, shape.columns],
            gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
        ),
    )


@gluon.jit
def copy_step(copies, step, work, shape: gl.constexpr, own: gl.constexpr):
    """Start to copy a step, unless it is past the end."""
    GROUPS: gl.constexpr = 1024 // shape.bits // shape.group
    NUM_SPANS: gl.constexpr = (shape.size * shape.bits + 1023) // 1024
    turn = step % shape.turns
    begin = tile_begin(work, step // shape.turns, own)
    words_at = copies.words_at + begin * (NUM_SPANS * 32)
    pairs_at = copies.pairs_at + begin
    if NUM_SPANS % (shape.warps * shape.turns) == 0:
        words_at += turn * (shape.warps * 32)
        pairs_at += turn * (shape.warps * GROUPS) * work.num_weight_rows
    else:
        # Spans past the end repeat the last one, and meet zeros.
        words_at += gl.minimum(copies.span + turn * shape.warps, NUM_SPANS - 1) * 32
        group = gl.minimum(copies.group + turn * (shape.warps * GROUPS), NUM_SPANS * GROUPS - 1)
        pairs_at += group * work.num_weight_rows
    async_copy.async_copy_global_to_shared(
        copies.words.index(step % shape.stages), words_at, mask=copies.span * 0 + step < work.num_steps
    )
    async_copy.async_copy_global_to_shared(
        copies.pairs.index(step % shape.stages), pairs_at, mask=copies.group * 0 + step < work.num_steps
    )
    async_copy.commit_group()


@gluon.jit
def tile_begin(work, tile, own: gl.constexpr):
    """Return the first column of a tile; the last one begins early, so that it is whole."""
    return gl.maximum(gl.minimum(work.first + tile * own, work.num_columns - own), 0)
