"""All-reduce kernels, in place. Imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.parallel.shared_memory import HALF_BYTES, MAX_PROGRAMS, SharedMemory
from octavo.parallel.triton.rank_barrier import area, barrier, count_on, send, slot_size, sum_slots

_TILE, _NUM_WARPS = 2048, 8
# Part sizes in two shots are multiples of this many values, so that parts are aligned.
_PART_MULTIPLE = 16


def sum_one_shot(tensor: Tensor, memory: SharedMemory) -> None:
    """Sum a tensor over ranks in place, with one barrier.

    Args:
        tensor: contiguous, at most memory.one_shot_bytes.
        memory: of this rank.
    """
    num_values = tensor.numel()
    assert tensor.nbytes <= memory.one_shot_bytes
    launch(
        _one_shot_kernel,
        (min(MAX_PROGRAMS, -(-num_values // _TILE)),),
        x_ptr=tensor, table=memory.table, count_ptr=memory.count, num_values=num_values, rank=memory.rank,
        WORLD=memory.size, TILE=_TILE,
        num_warps=_NUM_WARPS, **overlap_options(tensor),
    )  # fmt: skip


def sum_two_shot(tensor: Tensor, memory: SharedMemory) -> None:
    """Sum a tensor over ranks in place, with two barriers and less traffic.

    Args:
        tensor: contiguous, at most choice.two_shot_bytes.
        memory: of this rank.
    """
    size = memory.size
    part = -(-tensor.numel() // (size * _PART_MULTIPLE)) * _PART_MULTIPLE
    assert 2 * part * size * tensor.itemsize <= HALF_BYTES
    launch(
        _two_shot_kernel,
        (min(MAX_PROGRAMS, -(-part // _TILE)),),
        x_ptr=tensor, table=memory.table, count_ptr=memory.count, num_values=tensor.numel(), part=part,
        rank=memory.rank, WORLD=size, TILE=_TILE,
        num_warps=_NUM_WARPS, **overlap_options(tensor),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x_ptr, table, count_ptr, num_values, rank,
    WORLD: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,). Each program sums its own tiles."""
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    slot = slot_size(dtype, WORLD)
    first, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    wait_for_previous(OVERLAP)
    count = tl.load(count_ptr + tl.program_id(0))
    for start in range(first, num_values, step):
        index = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + index, mask=index < num_values, other=0.0)
        send(x, table, rank, count, rank * slot + index, index < num_values, WORLD)
    barrier(table, rank, count, 0, WORLD)
    sent = area(table, rank, count, dtype)
    for start in range(first, num_values, step):
        index = start + tl.arange(0, TILE)
        total = sum_slots(sent + index, index < num_values, slot, WORLD)
        tl.store(x_ptr + index, total.to(dtype), mask=index < num_values)
    count_on(count_ptr, count)


@triton.jit(do_not_specialize=["rank"])
def _two_shot_kernel(
    x_ptr, table, count_ptr, num_values, part, rank,
    WORLD: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,). A program handles the same tiles of every rank's part.

    half    [rank] what ranks sent of this rank's part | [rank] sums of all parts
    """
    start_next(OVERLAP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    slot = slot_size(dtype, 2 * WORLD)
    sums = slot * WORLD
    first, step = tl.program_id(0) * TILE, tl.num_programs(0) * TILE
    wait_for_previous(OVERLAP)
    count = tl.load(count_ptr + tl.program_id(0))
    for turn in tl.static_range(WORLD):
        other = (rank + turn) % WORLD
        to = area(table, other, count, dtype) + rank * slot
        for start in range(first, part, step):
            index = start + tl.arange(0, TILE)
            inside = (index < part) & (other * part + index < num_values)
            x = tl.load(x_ptr + other * part + index, mask=inside, other=0.0)
            tl.store(to + index, x, mask=inside)
    barrier(table, rank, count, 0, WORLD)
    half = area(table, rank, count, dtype)
    for start in range(first, part, step):
        index = start + tl.arange(0, TILE)
        inside = (index < part) & (rank * part + index < num_values)
        total = sum_slots(half + index, inside, slot, WORLD).to(dtype)
        send(total, table, rank, count, sums + rank * slot + index, inside, WORLD)
    barrier(table, rank, count, 1, WORLD)
    for source in tl.static_range(WORLD):
        for start in range(first, part, step):
            index = start + tl.arange(0, TILE)
            inside = (index < part) & (source * part + index < num_values)
            total = tl.load(half + sums + source * slot + index, mask=inside, cache_modifier=".cg")
            tl.store(x_ptr + source * part + index, total, mask=inside)
    count_on(count_ptr, count)
