"""Merge of a (unit, kv head) whose key tiles lie in the runs of several programs of hopper/decode.py.

    (unit, head)   |----a----|--------b--------|--c--|
    run            |-----0-----|-----1-----|----2----|       b is in three pieces

    program 0, 1, 2:  store the piece's (out, lse) in its partial result
                      thread barrier
                      atomic_add(arrivals[b], 1)             old value 0 or 1: go on with the next piece
                                                             old value 2:      merge the three, set it to 0

    partial results   | 2 * program: piece at the run's begin | 2 * program + 1: piece after it |

A run has at most two pieces that other programs share: its first and its last. So two partial results for
each program suffice. There is no mbarrier and no shared memory here: the programs run on different SMs, and
the counter's acquire and release order what they wrote. Pieces are merged in their order, whichever came
last, so the result does not depend on timing.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Partial results that are loaded side by side, times their rows.
_ROWS_ABREAST = gl.constexpr(8)


class Run(NamedTuple):
    """The schedule, and the memory that programs share; the fields of ThinWork."""

    units: Any
    schedule: Any
    arrivals: Any
    partial_out: Any
    partial_lse: Any


@gluon.jit
def partial_id(at, tiles_per_program):
    """Number of the partial result of the piece that starts at tile `at`; see the picture above."""
    return 2 * (at // tiles_per_program) + (at % tiles_per_program != 0).to(gl.int32)


@gluon.jit
def merge_pieces(
    queries, run, record, kv_head, head_begin, first_program, num_pieces,
    tiles_per_program, shape, ROWS: gl.constexpr,
):  # fmt: skip
    """Merge the pieces of one (unit, kv head) in order and write its rows, of which at most ROWS exist.

    Specification: octavo.attention.merge. It is a function of its own because the warp that attended the last
    piece merges at once, with layouts of one warp: another launch would cost more than the merge.
    """
    D: gl.constexpr = shape.head_dim
    ABREAST: gl.constexpr = _ROWS_ABREAST // ROWS if ROWS < _ROWS_ABREAST else 1
    LANES: gl.constexpr = D // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    token_begin, num_tokens = gl.load(record + 1), gl.load(record + 2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, PARTS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    valid = row < num_tokens * shape.group
    head = kv_head * shape.group + row % shape.group
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, PARTS))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(0, PARTS))
    values = gl.zeros([ROWS, D], gl.float32, layout=OUT)
    for begin in range(0, num_pieces, ABREAST):
        piece = begin + gl.arange(0, ABREAST, layout=gl.SliceLayout(1, PARTS))
        start = gl.where(piece == 0, head_begin, (first_program + piece) * tiles_per_program)
        place = (partial_id(start, tiles_per_program) * shape.rows)[:, None] + row[None, :]
        mask = (piece < num_pieces)[:, None] & valid[None, :]
        lse = gl.load(run.partial_lse + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        partial = run.partial_out + (place * D)[:, :, None] + d[None, :][None, :, :]
        out = gl.load(partial, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        top, total, values = _fold(top, total, values, out, lse)
    safe = gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, float("-inf"), top + gl.log(safe))
    at = (token_begin + row // shape.group).to(gl.int64) * (shape.group * shape.kv_heads) + head
    gl.store(queries.lse + at, lse, mask=valid)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    at, safe, valid = gl.convert_layout(at, ROW), gl.convert_layout(safe, ROW), gl.convert_layout(valid, ROW)
    out = (values / safe[:, None]).to(queries.out.dtype.element_ty)
    gl.store(queries.out + (at * D)[:, None] + d[None, :], out, mask=valid[:, None])


@gluon.jit
def _fold(top, total, values, out, lse):
    """Fold partial results out [P, R, D], lse [P, R] (natural log) into the state of a running softmax.

    As triton.tiles.fold_partials, in natural logs and with Gluon's explicit layouts.
    """
    new_top = gl.maximum(top, gl.max(lse, 0))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp(lse - base[None, :])
    shrink = gl.exp(top - base)
    total = total * shrink + gl.sum(weights, 0)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, values.type.layout))
    values = values * shrink[:, None] + gl.sum(weights[:, :, None] * out, 0)
    return new_top, total, values
