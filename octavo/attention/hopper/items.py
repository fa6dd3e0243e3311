"""Which work a program of hopper/prefill.py does: at each turn one item, a (unit, kv head)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.attention.triton.units import RECORD


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
