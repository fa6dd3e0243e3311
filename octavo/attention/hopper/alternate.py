"""How two warpgroups take turns at the tensor cores, so that one's softmax runs beside the other's products.

Left alone, both start their products together, wait for them together, and then both leave the tensor cores
idle during their softmax.

    warpgroup 0   wait go[0] -> start products -> arrive go[1] -> softmax ......... wait go[0] -> ...
    warpgroup 1                                   wait go[1] -> start products -> arrive go[0] -> softmax

Each has one turn per tile of keys, also for tiles that it passes over.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def make_go():
    """Allocate the two mbarriers; warpgroup 0 is first."""
    go = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(go.index(0), count=1)
    mbarrier.init(go.index(1), count=1)
    fence_async_shared()
    return go


@gluon.jit
def begin_products(go, tile, SECOND: gl.constexpr):
    """Wait until it is this warpgroup's turn with tile number `tile`; go None: it is alone."""
    if go is not None:
        if SECOND:
            mbarrier.wait(go.index(1), tile & 1)
        else:
            # A new barrier counts as having completed the phase before its first.
            mbarrier.wait(go.index(0), (tile & 1) ^ 1)


@gluon.jit
def end_products(go, SECOND: gl.constexpr):
    """Give the turn to the other warpgroup."""
    if go is not None:
        if SECOND:
            mbarrier.arrive(go.index(0), count=1)
        else:
            mbarrier.arrive(go.index(1), count=1)
