"""The part of a sum over ranks that comes after the barrier, as a kernel of its own, on slots of its own."""

import triton
import triton.language as tl

from octavo.kernels.rms_norm import add_to_stream, inverse_rms
from octavo.parallel.triton.rank_barrier import sum_slots


@triton.jit
def sum_and_norm_kernel(
    slots_ptr, residual_ptr, weight_ptr, out_ptr, size, eps,
    SLOT: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Adds the sum of a row's slots to the residual, in place, and norms it."""
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = tl.program_id(0) * size + column
    total = sum_slots(slots_ptr + at, inside, SLOT, WORLD)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = add_to_stream(total.to(slots_ptr.dtype.element_ty).to(tl.float32), residual_ptr + at, inside)
    out = x * inverse_rms(x, size, eps) * weight
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def do_not_wait(table, rank, count, NUMBER: tl.constexpr, WORLD: tl.constexpr):
    """In place of `barrier`, where one process plays all ranks."""
