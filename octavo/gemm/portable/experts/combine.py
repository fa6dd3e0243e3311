"""The sum over a token's experts, in one order; imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gemm.expert_choice import Choice
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

_BLOCK = 1024


def combine_rows(rows: Tensor, choice: Choice, residual: Tensor | None = None, *, num_held: int) -> Tensor:
    """Sum each token's rows times their weights, in float32, from the first to the last.

    Args:
        rows: [T k, H] contiguous, a token's k rows one after the other.
        choice: each token's experts and their weights, contiguous.
        residual: [T, H], dtype of rows, rows any stride apart: the sums are added to it in place; or None.
        num_held: rows of experts from this one on count as 0, whatever they hold.

    Returns:
        residual, or a new [T, H], dtype of rows.
    """
    num_tokens, num_chosen = choice.experts.shape
    size = rows.shape[1]
    out = rows.new_empty(num_tokens, size) if residual is None else residual
    if num_tokens:
        launch(
            _combine_kernel,
            (-(-size // _BLOCK), num_tokens),
            rows,
            *choice,
            out,
            size,
            out.stride(0),
            num_chosen,
            _BLOCK,
            num_held,
            residual is not None,
            **overlap_options(rows),
        )
    return out


@triton.jit
def _combine_kernel(
    rows_ptr, experts_ptr, weights_ptr, out_ptr, size, stride_out,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, NUM_HELD: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(H / BLOCK), T)."""
    start_next(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_previous(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + number
        # Loaded whether it counts or not, so that no load waits for another.
        row = tl.load(rows_ptr + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        is_held = tl.load(experts_ptr + pair) < NUM_HELD
        total += tl.where(is_held, row, 0.0) * tl.load(weights_ptr + pair)
    out_at = out_ptr + token * stride_out + column
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)
