"""The work of a program of tma_prefill.py, one item (unit, kv head) a turn, and its queries and results.

A warpgroup has 64 rows of a unit:

    row     0 1 2 .. group - 1, group ..            query heads of one kv head, token after token
    token   0 0 0 .. 0        , 1 ..                of the unit; `gather` says which row of q it is

A turn's queries are copied to shared memory (cp.async) while the turn before it ends. Where heads are wider
than 256, both warpgroups have the same rows: each copies half of the queries' dimensions, and has half of
those of values and results. They wait for each other, at hardware barrier 10, before they read and before
they overwrite queries.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from octavo.attention.triton.kernel_call import Call
from octavo.attention.triton.step_map import RECORD
from octavo.attention.triton.tiles import LN_2


class Work(NamedTuple):
    """The units' records, the number of items, and each program's number of turns."""

    units: Any
    num_items: Any
    turns: Any


@gluon.jit
def item_of(turn):
    """Return the item of a turn: forth and back through the programs, to balance their work."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if turn % 2 == 1:
        program = num_programs - 1 - program
    return turn * num_programs + program


@gluon.jit
def record_of(work, item, shape):
    """Return the record of an item's unit."""
    return work.units + item // shape.kv_heads * RECORD


@gluon.jit
def key_tiles(record, KEYS: gl.constexpr):
    """Return a unit's first key tile and the number of its tiles; 0 for an unused record."""
    exists = gl.load(record + 2) > 0
    first = gl.load(record + 3) // KEYS
    return first, gl.where(exists, gl.cdiv(gl.load(record + 4), KEYS) - first, 0)


# Query rows of a warpgroup.
HALF = gl.constexpr(64)


@gluon.constexpr_function
def shares_rows(head_dim):
    """Return whether both warpgroups have the same rows, each with half of the dimensions."""
    return head_dim > 256


@gluon.constexpr_function
def num_warpgroups(rows, head_dim):
    """Return how many warpgroups attend units of so many rows."""
    return 2 if head_dim > 256 else rows // 64


@gluon.constexpr_function
def first_row(second, head_dim):
    """Return the first row of a unit that the first or the second warpgroup has."""
    return 64 if second and head_dim <= 256 else 0


@gluon.constexpr_function
def first_dim(second, head_dim):
    """Return the first dimension of values and results that a warpgroup has."""
    return head_dim // 2 if second and head_dim > 256 else 0


@gluon.constexpr_function
def own_dim(head_dim):
    """Return how many dimensions of values a warpgroup has."""
    return head_dim // 2 if head_dim > 256 else head_dim


@gluon.jit
def own_half(tile, shape, SECOND: gl.constexpr):
    """Return the columns of a tile [rows, D] that are a warpgroup's own: the tile, or half of it."""
    if shares_rows(shape.head_dim):
        # Of 64 columns each, a swizzled tile's parts lie one after another.
        halves = tile._reinterpret(tile.dtype, [2, tile.shape[0], tile.shape[1] // 2], tile.layout)
        return halves.index(1 if SECOND else 0)
    else:
        return tile


@gluon.jit
def named_barrier(ASSEMBLY: gl.constexpr):
    """Use one of the hardware barriers 8, 9 and 10, which Triton does not use."""
    # Gluon's assembly must have an operand and a result.
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


# Each copy has 16 bytes and must begin at a multiple of 16, the only multiple that Triton recognises.
_ALIGNED = 16


class Gather(NamedTuple):
    """Scattered query tokens: entry i is row tokens[i] of q, and its partial result is row partial_ids[i].

    Rows of q from num_rows on do not exist.
    """

    tokens: Any
    partial_ids: Any
    num_rows: Any


def unsupported_reason(call: Call) -> str | None:
    """Return why a call's queries cannot be copied so, or None if they can."""
    token, head, _ = call.q.stride()
    if call.q.data_ptr() % _ALIGNED == 0 and token % _ALIGNED == 0 and head % _ALIGNED == 0:
        return None
    return f"queries must begin at, and have strides of, multiples of {_ALIGNED}"


@gluon.jit
def fetch_next_queries(queries, gather, work, turn, q, shape, SECOND: gl.constexpr):
    """Start to copy the queries of the turn after `turn` when no warpgroup reads those of `turn` any more."""
    if shares_rows(shape.head_dim):
        named_barrier("bar.sync 10, 256; mov.u32 $0, 0;")
    fetch_queries(queries, gather, work, turn + 1, q, shape, SECOND)


@gluon.jit
def fetch_queries(queries, gather, work, turn, q, shape, SECOND: gl.constexpr):
    """Start to copy a turn's queries to shared memory `q` [HALF, D], whose last reads are done.

    Rows that do not exist keep what was there; nobody reads their results.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FIRST_ROW: gl.constexpr = first_row(SECOND, shape.head_dim)
    OWN: gl.constexpr = own_dim(shape.head_dim)
    item = item_of(turn)
    if item < work.num_items:
        record = record_of(work, item, shape)
        row = FIRST_ROW + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        d = first_dim(SECOND, shape.head_dim) + gl.arange(0, OWN, layout=gl.SliceLayout(0, LAYOUT))
        exists = row < gl.load(record + 2) * shape.group
        token, exists = query_rows(gather, gl.load(record + 1) + row // shape.group, exists)
        head = item % shape.kv_heads * shape.group + row % shape.group
        pointers = queries.q + (token * queries.token + head * queries.head)[:, None] + d[None, :]
        target = own_half(q, shape, SECOND)
        async_copy.async_copy_global_to_shared(target, pointers, mask=exists[:, None])
    async_copy.commit_group()


@gluon.jit
def wait_for_queries(shape):
    """Wait for the copies that fetch_queries started; products may read them then."""
    async_copy.wait_group(0)
    fence_async_shared()
    if shares_rows(shape.head_dim):
        named_barrier("bar.sync 10, 256; mov.u32 $0, 0;")


@gluon.jit
def query_rows(gather, entry, valid):
    """Return each entry's row of q [R] int64 and whether it exists [R]; without gather, the entry itself."""
    if gather is None:
        return entry.to(gl.int64), valid
    else:
        token = gl.load(gather.tokens + entry, mask=valid, other=0)
        return token.to(gl.int64), valid & (token < gather.num_rows)


@gluon.jit
def _result_rows(gather, entry, valid):
    """Return each entry's row of the results [R] int64; without gather, the entry itself."""
    if gather is None:
        return entry.to(gl.int64)
    else:
        return gl.load(gather.partial_ids + entry, mask=valid, other=0).to(gl.int64)


@gluon.jit
def store_results(
    queries, gather, values, top, total, record, kv_head, shape, SECOND: gl.constexpr
):  # fmt: skip
    """Normalise and write a half tile's rows; out 0 and lse -inf where no key was visible."""
    O_LAYOUT: gl.constexpr = values.type.layout
    DTYPE: gl.constexpr = queries.out.dtype.element_ty
    FIRST_ROW: gl.constexpr = first_row(SECOND, shape.head_dim)
    OWN: gl.constexpr = own_dim(shape.head_dim)
    BETWEEN: gl.constexpr = _layout_between(O_LAYOUT, OWN, DTYPE)
    WIDE: gl.constexpr = _wide_layout(O_LAYOUT, OWN, DTYPE)
    safe = gl.where(total == 0, 1.0, total)
    scale = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O_LAYOUT))
    out = gl.convert_layout((values * scale[:, None]).to(DTYPE), BETWEEN)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    at, exists = _places(gather, record, kv_head, shape, FIRST_ROW, WIDE_ROW)
    d = first_dim(SECOND, shape.head_dim) + gl.arange(0, OWN, layout=gl.SliceLayout(0, WIDE))
    pointers = queries.out + (at * shape.head_dim)[:, None] + d[None, :]
    gl.store(pointers, gl.convert_layout(out, WIDE), mask=exists[:, None])
    ROW: gl.constexpr = top.type.layout
    at, exists = _places(gather, record, kv_head, shape, FIRST_ROW, ROW)
    lse = gl.where(total == 0, float("-inf"), (top + gl.log2(safe)) * LN_2)
    gl.store(queries.lse + at, lse, mask=exists)


@gluon.jit
def _places(gather, record, kv_head, shape, FIRST_ROW: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where each row's results lie, counted in rows and heads [R] int64, and whether it exists."""
    row = FIRST_ROW + gl.arange(0, HALF, layout=LAYOUT)
    exists = row < gl.load(record + 2) * shape.group
    result = _result_rows(gather, gl.load(record + 1) + row // shape.group, exists)
    return result * (shape.group * shape.kv_heads) + kv_head * shape.group + row % shape.group, exists


@gluon.constexpr_function
def _layout_between(o_layout, head_dim, dtype):
    """Return a layout between that of products and _wide_layout.

    Triton exchanges numbers within a warp, without shared memory, where one bit of a number's place moves
    from a register's to a lane's number. Here two must, one at a time.
    """
    if dtype.primitive_bitwidth != 16:
        return o_layout
    return _warp_layout([[0, 1], [8, 0], [0, 2], [0, 16]], [[0, 8], [0, 4]], head_dim)


@gluon.constexpr_function
def _wide_layout(o_layout, head_dim, dtype):
    """Return a layout whose threads hold 8 columns in a row, 16 bytes, unless numbers are wide already."""
    if dtype.primitive_bitwidth != 16:
        return o_layout
    return _warp_layout([[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16]], head_dim)


@gluon.constexpr_function
def _warp_layout(registers, lanes, head_dim):
    """Return a layout whose warps hold 16 rows each, as products do; the caller chooses the other bits."""
    columns = [[0, column] for column in (32, 64, 128) if column < head_dim]
    return gl.DistributedLinearLayout(
        reg_bases=[*registers, *columns],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, head_dim],
    )
