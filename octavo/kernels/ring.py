"""A ring of buffers between a warp that fetches by TMA and warps that multiply.

Step s is in stage s % stages.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Bytes that a program copies at a time, about twice what keeps an H100's memory busy: one that has an SM for
# itself, and a GEMV, which shares an SM with the next kernel's. More would only wait in front of memory, and
# what a kernel needs at once, rows, results and counters, would wait behind them.
UNDER_WAY = gl.constexpr(64 * 1024)
_UNDER_WAY_BESIDE = gl.constexpr(48 * 1024)


class Ring(NamedTuple):
    """Barriers in shared memory, [stages, 1] each: a stage holds its step; all users have read it."""

    filled: Any
    free: Any


@gluon.jit
def make_ring(STAGES: gl.constexpr, USERS: gl.constexpr = 1):
    """Return the barriers of free stages; each of so many partitions of warps frees a stage."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.filled.index(stage), count=1)
        mbarrier.init(ring.free.index(stage), count=USERS)
    fence_async_shared()
    return ring


@gluon.jit
def claim_stage(ring, step, num_bytes: gl.constexpr, STAGES: gl.constexpr, PACED: gl.constexpr = True):
    """Wait until a step's stage is free; return it, and the barrier that so many copied bytes complete.

    PACED: as GEMVs do, wait also until a step more is not too much under way.
    """
    if PACED:
        keep_pace(ring, step, num_bytes, STAGES)
    stage = wait_until_free(ring, step, STAGES)
    filled = ring.filled.index(stage)
    mbarrier.expect(filled, num_bytes)
    return stage, filled


@gluon.jit
def keep_pace(ring, step, num_bytes: gl.constexpr, STAGES: gl.constexpr):
    """Wait until a step more is not too much under way for a GEMV."""
    AHEAD: gl.constexpr = steps_under_way(num_bytes, _UNDER_WAY_BESIDE)
    if AHEAD < STAGES:
        earlier = step - AHEAD
        if earlier >= 0:
            wait_for_stage(ring, earlier, STAGES)


@gluon.constexpr_function
def steps_under_way(num_bytes, most=UNDER_WAY):
    """Return how many steps of so many bytes are copied at a time, at least two."""
    return max(2, most // num_bytes)


@gluon.jit
def wait_until_free(ring, step, STAGES: gl.constexpr):
    """Wait until all have read what a step's stage held before; return the stage."""
    stage = step % STAGES
    mbarrier.wait(ring.free.index(stage), (step // STAGES + 1) & 1)
    return stage


@gluon.jit
def wait_for_stage(ring, step, STAGES: gl.constexpr):
    """Wait until a step is in its stage; return the stage, to be freed once it is read."""
    stage = step % STAGES
    mbarrier.wait(ring.filled.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def free_stage(ring, stage):
    """Say that all have read a stage."""
    mbarrier.arrive(ring.free.index(stage))
