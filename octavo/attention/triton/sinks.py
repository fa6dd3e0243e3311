"""Attention sinks: results are merged with one more key per head, whose value is 0."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.tilings.portable import padded_head_dim
from octavo.attention.triton.tiles import LN_2, LOG2_E
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

_ROWS = 8


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, result: Tensor) -> None:
    """Write attention results with sinks.

    Specification: octavo.attention.merge.add_sinks.

    Args:
        out: [T, H, D] float32, contiguous.
        lse: [T, H] float32, contiguous; changed in place.
        sinks: [H], any floating dtype, contiguous.
        result: [T, H, D], contiguous, written.
    """
    num_tokens, num_heads, head_dim = out.shape
    num_rows = num_tokens * num_heads
    launch(
        _sinks_kernel,
        (-(-num_rows // _ROWS),),
        out_ptr=out, lse_ptr=lse, sinks_ptr=sinks, result_ptr=result, num_rows=num_rows, NUM_HEADS=num_heads,
        DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim), ROWS=_ROWS,
        num_warps=4, **overlap_options(out),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _sinks_kernel(
    out_ptr, lse_ptr, sinks_ptr, result_ptr, num_rows,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows, each a head of a token."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DIM)
    valid = row < num_rows
    inside = valid[:, None] & (d < DIM)[None, :]
    wait_for_previous(OVERLAP)
    lse = tl.load(lse_ptr + row, mask=valid, other=0.0)
    sink = tl.load(sinks_ptr + row % NUM_HEADS, mask=valid, other=0.0).to(tl.float32)
    top = tl.maximum(lse, sink)
    # With a sink of -inf, a row without keys stays empty.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((lse - base) * LOG2_E)
    total = weight + tl.exp2((sink - base) * LOG2_E)
    safe = tl.where(total == 0, 1.0, total)
    at = (row * DIM)[:, None] + d[None, :]
    out = tl.load(out_ptr + at, mask=inside, other=0.0) * (weight / safe)[:, None]
    tl.store(result_ptr + at, out.to(result_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + row, tl.where(total == 0, float("-inf"), base + tl.log2(safe) * LN_2), mask=valid)
