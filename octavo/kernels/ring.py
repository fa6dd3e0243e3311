"""A ring of buffers between a warp that fetches by TMA and warps that multiply.

Step s is in stage s % stages.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Bytes that a program keeps in flight, about twice what keeps an H100's memory busy: a program with an SM for
# itself, and a GEMV's, which shares its SM with the next kernel's. More would only queue in front of memory,
# and delay what a kernel needs at once: rows, results and counters.
IN_FLIGHT = gl.constexpr(64 * 1024)
_IN_FLIGHT_BESIDE = gl.constexpr(48 * 1024)


class Ring(NamedTuple):
    """Barriers in shared memory, [stages, 1] each: a stage is filled with its step, and free once read."""

    filled: Any
    free: Any


@gluon.jit
def make_ring(STAGES: gl.constexpr, USERS: gl.constexpr = 1):
    """Return the barriers of free stages; a stage is free once USERS partitions of warps have freed it."""
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
    """Wait until a step's stage is free; return it, and the barrier that `num_bytes` copied bytes complete.

    With PACED, also block until one more step would stay below a GEMV's in-flight limit.
    """
    if PACED:
        keep_pace(ring, step, num_bytes, STAGES)
    stage = wait_until_free(ring, step, STAGES)
    filled = ring.filled.index(stage)
    mbarrier.expect(filled, num_bytes)
    return stage, filled


@gluon.jit
def keep_pace(ring, step, num_bytes: gl.constexpr, STAGES: gl.constexpr):
    """Block until one more step would stay below a GEMV's in-flight limit."""
    AHEAD: gl.constexpr = steps_in_flight(num_bytes, _IN_FLIGHT_BESIDE)
    if AHEAD < STAGES:
        earlier = step - AHEAD
        if earlier >= 0:
            wait_for_stage(ring, earlier, STAGES)


@gluon.constexpr_function
def steps_in_flight(num_bytes, most=IN_FLIGHT):
    """Return how many steps of `num_bytes` are in flight at a time, at least two."""
    return max(2, most // num_bytes)


@gluon.jit
def wait_until_free(ring, step, STAGES: gl.constexpr):
    """Wait until all users have read what a step's stage held before; return the stage."""
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
    """Mark a stage as read."""
    mbarrier.arrive(ring.free.index(stage))
