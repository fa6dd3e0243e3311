"""A sum over ranks, the residual sum and the root-mean-square norm as one kernel; only where Triton runs.

A rank sends its part of each row to all others, meets them, and reads all parts of the rows that it sums.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.padded_rows import new_rows
from octavo.kernels.rms_norm import add_to_stream, check_rows, inverse_rms, tile_of
from octavo.parallel.shared_memory import MAX_PROGRAMS, SharedMemory
from octavo.parallel.triton.rank_barrier import area, barrier, count_on, send, slot_size, sum_slots


def sum_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float, memory: SharedMemory) -> Tensor:
    """Add the sum over ranks of their parts to x in place, and return x / rms(x) * weight.

    The sum over ranks is rounded to the dtype of x before it is added, as if each step were a kernel.

    Args:
        x: [T, C] bfloat16, float16 or float32, the same on all ranks; rows any stride apart.
        part: [T, C] like x, contiguous; at most memory.one_shot_bytes.
        weight: [C] contiguous, any floating dtype.
        eps: added to the mean square.
        memory: of this rank.

    Returns:
        A new contiguous [T, C], dtype of x: the same bits on all ranks.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    check_rows(x, weight, part)
    num_rows, size = x.shape
    out = new_rows(x, num_rows, size)
    if num_rows == 0:
        return out
    block, num_warps = tile_of(size)
    launch(
        _sum_rms_norm_kernel,
        (min(MAX_PROGRAMS, num_rows),),
        part_ptr=part, residual_ptr=x, weight_ptr=weight, out_ptr=out, stride_part=part.stride(0),
        stride_residual=x.stride(0), num_rows=num_rows, size=size, eps=eps, table=memory.table,
        count_ptr=memory.count, rank=memory.rank, WORLD=memory.size, BLOCK=block,
        num_warps=num_warps, **overlap_options(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _sum_rms_norm_kernel(
    part_ptr, residual_ptr, weight_ptr, out_ptr, stride_part, stride_residual, num_rows, size, eps,
    table, count_ptr, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,). Each program has rows of its own."""
    start_next(OVERLAP)
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    slot = slot_size(dtype, WORLD)
    column = tl.arange(0, BLOCK)
    inside = column < size
    first, step = tl.program_id(0), tl.num_programs(0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    count = tl.load(count_ptr + first)
    for row in range(first, num_rows, step):
        part = tl.load(part_ptr + row * stride_part + column, mask=inside, other=0.0)
        send(part, table, rank, count, rank * slot + row * size + column, inside, WORLD)
    barrier(table, rank, count, 0, WORLD)
    sent = area(table, rank, count, dtype)
    for row in range(first, num_rows, step):
        total = sum_slots(sent + row * size + column, inside, slot, WORLD)
        # The sum is rounded as if it had been stored.
        total = total.to(dtype).to(tl.float32)
        x = add_to_stream(total, residual_ptr + row * stride_residual + column, inside)
        out = x * inverse_rms(x, size, eps) * weight
        tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    count_on(count_ptr, count)
