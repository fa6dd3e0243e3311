"""Split-K with programs of equal work: which spans a program multiplies, and how partial sums come together.

A stripe is a tile of the weight, and as many rows of x as a program multiplies it by; a unit is one span of a
stripe. Programs share all units equally, each a run of neighbours:

    units of stripes    0 0 0 0 0 0 | 1 1 1 1 1 1 | 2 2 2 2 2 2
    programs            0 0 0 0 1 1   1 1 2 2 2 2   3 3 3 3 4 4 ...

When several programs share a stripe, the last one adds up all parts, in their order; the others store theirs
and count them. A program begins with its last stripe, and thus with a part that another one waits for; the
parts that it waits for itself, it needs at the very end. Programs wait only for those with lower numbers, and
GPUs start programs in the order of their numbers, so none waits for one that finds no room.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import debug_barrier

from octavo.forms.packed import TILE

_TILE = gl.constexpr(TILE)
# Sums fetched at a time: 64 per thread, or 128 where registers allow it.
_FETCHED = gl.constexpr(16384)


class Work(NamedTuple):
    """The size of the whole work.

    Attributes:
        num_rows: M.
        num_columns: columns of the result.
        num_spans: spans in a row of the weight.
        num_units: spans of all stripes.
        num_groups: groups of rows of x; stripes of the same rows of the weight are neighbours.
    """

    num_rows: Any
    num_columns: Any
    num_spans: Any
    num_units: Any
    num_groups: Any


class Parts(NamedTuple):
    """Where parts of stripes are kept.

    Attributes:
        sums: [programs, sums of a stripe] float32.
        arrivals: [stripes] int32, zero before and after: parts that have been stored.
    """

    sums: Any
    arrivals: Any


class Share(NamedTuple):
    """The units of a program, first : end, and their stripes, head to tail."""

    first: Any
    end: Any
    head: Any
    tail: Any


@gluon.jit
def own_share(work):
    """Return the units of this program, at least one."""
    program = gl.program_id(0)
    first = program * work.num_units // gl.num_programs(0)
    end = (program + 1) * work.num_units // gl.num_programs(0)
    return Share(first, end, first // work.num_spans, (end - 1) // work.num_spans)


@gluon.jit
def units_of(stripe, share, work):
    """Return the program's units of a stripe, first : end."""
    first = stripe * work.num_spans
    return gl.maximum(first, share.first), gl.minimum(first + work.num_spans, share.end)


@gluon.jit
def unit_at(turn, share, work):
    """Return the program's unit number `turn`, in the order in which it multiplies: its last stripe first."""
    first, end = units_of(share.tail, share, work)
    beyond = gl.maximum(turn - (end - first), 0)
    stripe = gl.where(turn < end - first, share.tail, share.tail - 1 - beyond // work.num_spans)
    within = gl.where(turn < end - first, turn, beyond % work.num_spans)
    return gl.maximum(stripe * work.num_spans, share.first) + within


@gluon.jit
def first_program(stripe, work):
    """Return the first of the programs that share a stripe."""
    return ((stripe * work.num_spans + 1) * gl.num_programs(0) - 1) // work.num_units


@gluon.jit
def leave_part(sums, stripe, parts, shape, LAYOUT: gl.constexpr):
    """Store a program's sums of a stripe, and count them."""
    at = _part_of(gl.program_id(0), parts, shape) + _offsets(shape.rows, LAYOUT)
    for block in gl.static_range(len(sums)):
        gl.store(at + block * (_TILE * shape.rows), sums[block])
    debug_barrier()
    gl.atomic_add(parts.arrivals + stripe, 1, sem="release", scope="gpu")


@gluon.jit
def add_parts(sums, stripe, parts, work, shape, LAYOUT: gl.constexpr):
    """Return the sums of a stripe: those of the last program that shares it, then those before, in turn."""
    PIECE: gl.constexpr = _TILE * shape.rows
    WIDE: gl.constexpr = _FETCHED * (2 if shape.rows > 32 and shape.blocks == 1 else 1) // PIECE
    program = gl.program_id(0)
    first = first_program(stripe, work)
    if first < program:
        counter = parts.arrivals + stripe
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        while arrived < program - first:
            arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        # The next launch needs zeros, and waits until this one has ended.
        gl.store(counter, 0)
        offsets = _offsets(shape.rows, LAYOUT)
        for begin in range(first, program, WIDE):
            for block in gl.static_range(len(sums)):
                loaded = ()
                for index in gl.static_range(WIDE):
                    at = _part_of(begin + index, parts, shape) + block * PIECE + offsets
                    exists = offsets < gl.where(begin + index < program, PIECE, 0)
                    loaded = loaded + (gl.load(at, mask=exists, other=0.0),)  # noqa: RUF005
                added = sums[block]
                for index in gl.static_range(WIDE):
                    added += loaded[index]
                sums = sums[:block] + (added,) + sums[block + 1 :]  # noqa: RUF005
    return sums


@gluon.jit
def _part_of(program, parts, shape):
    """Return where a program's part begins."""
    return parts.sums + program.to(gl.int64) * (shape.blocks * _TILE * shape.rows)


@gluon.jit
def _offsets(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where the sums of a tile are kept: 64 that a warp stores at a time lie side by side."""
    row = gl.arange(0, _TILE, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    return row // 8 * (8 * ROWS) + row % 8 * 8 + (column // 8 * 64 + column % 8)
