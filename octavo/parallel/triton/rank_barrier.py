"""Building blocks of kernels that sum over ranks: send, barrier, sum. shared_memory.py has the layout.

A program communicates only with the programs of the same index on other ranks: it sends them values, waits
for them at a barrier, and reads what they sent. Programs of one rank never wait for each other.
"""

import triton
import triton.language as tl

from octavo.parallel import shared_memory
from octavo.parallel.all_reduce import MAX_RANKS

_FLAG_BYTES = tl.constexpr(shared_memory.FLAG_BYTES)
_HALF_BYTES = tl.constexpr(shared_memory.HALF_BYTES)
_MAX_PROGRAMS = tl.constexpr(shared_memory.MAX_PROGRAMS)
_MAX_RANKS = tl.constexpr(MAX_RANKS)

# Thread r tells rank r that this program arrived, then waits until the flag of rank r's program catches up.
# Flags grow by one with each sum and may wrap around, so the code compares their difference. The release
# store publishes what all threads of the program wrote before the barrier in front of it. Every 1,024 turns a
# waiting thread checks whether the host gave up.
_MEET = tl.constexpr("""{
    .reg .pred %meet_p;
    .reg .b32 %meet_thread, %meet_seen, %meet_turns;
    .reg .b64 %meet_at, %meet_base;
    mov.u32 %meet_thread, %tid.x;
    setp.ge.u32 %meet_p, %meet_thread, $6;
    @%meet_p bra meet_done;
    mul.wide.u32 %meet_at, %meet_thread, 8;
    add.u64 %meet_at, %meet_at, $1;
    ld.global.b64 %meet_base, [%meet_at];
    add.u64 %meet_base, %meet_base, $2;
    st.release.sys.global.u32 [%meet_base], $4;
    mul.wide.u32 %meet_at, %meet_thread, 4;
    add.u64 %meet_at, %meet_at, $3;
    mov.u32 %meet_turns, 0;
meet_wait:
    ld.acquire.sys.global.u32 %meet_seen, [%meet_at];
    sub.s32 %meet_seen, %meet_seen, $4;
    setp.ge.s32 %meet_p, %meet_seen, 0;
    @%meet_p bra meet_done;
    add.u32 %meet_turns, %meet_turns, 1;
    and.b32 %meet_seen, %meet_turns, 1023;
    setp.ne.u32 %meet_p, %meet_seen, 0;
    @%meet_p bra meet_wait;
    ld.volatile.global.u32 %meet_seen, [$5];
    setp.eq.u32 %meet_p, %meet_seen, 0;
    @%meet_p bra meet_wait;
meet_done:
    mov.u32 $0, 0;
}""")


@triton.jit
def barrier(table, rank, count, NUMBER: tl.constexpr, WORLD: tl.constexpr):
    """Wait until this program arrives here on all ranks. Their earlier writes are visible afterwards.

    Args:
        table: see SharedMemory.
        rank: this rank.
        count: number of sums before this one.
        NUMBER: 0 for the first of a sum, 1 for the second.
        WORLD: number of ranks.
    """
    flags = (NUMBER * _MAX_PROGRAMS + tl.program_id(0)) * _MAX_RANKS * 4
    theirs = (flags + rank * 4).to(tl.int64)
    own = tl.load(table + rank) + flags
    gone = tl.load(table + WORLD)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _MEET,
        "=r,l,l,l,r,l,r",
        [table.to(tl.int64), theirs, own, count + 1, gone, WORLD],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def area(table, rank, count, dtype: tl.constexpr):
    """Return a pointer to the half of a rank's block that this sum uses."""
    start = _FLAG_BYTES + (count & 1) * _HALF_BYTES
    return tl.multiple_of((tl.load(table + rank) + start).to(tl.pointer_type(dtype)), 16)


@triton.jit
def slot_size(dtype: tl.constexpr, WORLD: tl.constexpr):
    """Return the number of values in each rank's slot of a half."""
    return _HALF_BYTES // WORLD // (dtype.primitive_bitwidth // 8)


@triton.jit
def send(values, table, rank, count, offset, inside, WORLD: tl.constexpr):
    """Write values into the half of every rank, this one included. `offset` counts values."""
    for turn in tl.static_range(WORLD):
        # Each rank starts with itself, so that not all write to rank 0 first.
        other = (rank + turn) % WORLD
        tl.store(area(table, other, count, values.dtype) + offset, values, mask=inside)


@triton.jit
def sum_slots(at, inside, SLOT: tl.constexpr, WORLD: tl.constexpr):
    """Sum what all ranks sent, in float32 and in rank order, so all ranks get the same bits.

    Args:
        at: pointers into rank 0's slot.
        inside: mask of valid pointers; others give 0.
        SLOT: distance between slots, in values.
        WORLD: number of ranks.
    """
    # Bypass the L1 cache, which does not see the writes of other GPUs.
    total = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for source in tl.static_range(1, WORLD):
        sent = tl.load(at + source * SLOT, mask=inside, other=0.0, cache_modifier=".cg")
        total += sent.to(tl.float32)
    return total


@triton.jit
def count_on(count_ptr, count):
    """Count this sum: each program for itself, and for the programs that only larger launches have."""
    program = tl.program_id(0) + tl.arange(0, _MAX_PROGRAMS) * tl.num_programs(0)
    tl.store(count_ptr + program, tl.zeros_like(program) + count + 1, mask=program < _MAX_PROGRAMS)
