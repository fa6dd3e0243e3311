"""How two warpgroups take turns at the tensor cores, so that one's softmax runs beside the other's products.

Left alone, both start their products together, wait for them together, and then both leave the tensor cores
idle during their softmax.

    warpgroup 0   sync 8 -> start products -> arrive 9 -> softmax .......... sync 8 -> ...
    warpgroup 1                               sync 9 -> start products -> arrive 8 -> softmax

8 and 9 are hardware barriers, which Triton does not use; each completes with one warpgroup that waits at it
and one that goes on. Each warpgroup has one turn per tile of keys, also for tiles that it passes over.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def open_turns(SECOND: gl.constexpr):
    """Give the first turn to warpgroup 0; both warpgroups call this before their first turn."""
    if SECOND:
        _barrier("bar.arrive 8, 256; mov.u32 $0, 0;")


@gluon.jit
def begin_products(ALONE: gl.constexpr, SECOND: gl.constexpr):
    """Wait until it is this warpgroup's turn; ALONE: there is no other one."""
    if not ALONE:
        if SECOND:
            _barrier("bar.sync 9, 256; mov.u32 $0, 0;")
        else:
            _barrier("bar.sync 8, 256; mov.u32 $0, 0;")


@gluon.jit
def end_products(ALONE: gl.constexpr, SECOND: gl.constexpr):
    """Give the turn to the other warpgroup."""
    if not ALONE:
        if SECOND:
            _barrier("bar.arrive 8, 256; mov.u32 $0, 0;")
        else:
            _barrier("bar.arrive 9, 256; mov.u32 $0, 0;")


@gluon.jit
def _barrier(ASSEMBLY: gl.constexpr):
    # Gluon's assembly must have an operand and a result.
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)
