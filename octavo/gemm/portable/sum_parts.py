"""Sums of parts in one order: a token's experts, or splits of K; imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import activate
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

# Columns of a program; with splits it may have to read them for gate and for up.
_BLOCK_OF_EXPERTS, _BLOCK_OF_SPLITS = 1024, 512


def sum_experts(
    rows: Tensor, experts: Tensor, weights: Tensor, out: Tensor, *, num_held: int, adds: bool
) -> None:
    """Write the sums of each token's rows times their weights to out; see experts.combine.combine_rows."""
    num_tokens, num_chosen = experts.shape
    size = rows.shape[1]
    launch(
        _sum_parts_kernel,
        (-(-size // _BLOCK_OF_EXPERTS), num_tokens),
        parts_ptr=rows,
        experts_ptr=experts,
        weights_ptr=weights,
        bias_ptr=None,
        out_ptr=out,
        num_columns=size,
        stride_part=size,
        stride_row=num_chosen * size,
        stride_out=out.stride(0),
        PARTS=num_chosen,
        BLOCK=_BLOCK_OF_EXPERTS,
        NUM_HELD=num_held,
        ACTIVATION=None,
        ADD=adds,
        **overlap_options(rows),
    )


def add_parts(
    parts: Tensor, bias: Tensor | None, out: Tensor, activation: str | None, *, adds: bool
) -> Tensor:
    """Write epilogue(sum of parts of K, in order, + bias) to out, and return it.

    Args:
        parts: [splits, M, N] float32 contiguous.
        bias: [N] contiguous, or None.
        out: [M, N], or [M, N / 2] with an activation; rows any stride apart.
        activation: see skinny.skinny_linear.
        adds: whether the result is added to what out holds.
    """
    splits, num_rows, num_weight_rows = parts.shape
    num_columns = num_weight_rows // (1 if activation is None else 2)
    launch(
        _sum_parts_kernel,
        (-(-num_columns // _BLOCK_OF_SPLITS), num_rows),
        parts_ptr=parts,
        experts_ptr=None,
        weights_ptr=None,
        bias_ptr=bias,
        out_ptr=out,
        num_columns=num_columns,
        stride_part=parts.stride(0),
        stride_row=num_weight_rows,
        stride_out=out.stride(0),
        PARTS=splits,
        BLOCK=_BLOCK_OF_SPLITS,
        NUM_HELD=0,
        ACTIVATION=activation,
        ADD=adds,
        **overlap_options(out),
    )
    return out


@triton.jit
def _sum_parts(
    parts_ptr, experts_ptr, weights_ptr, bias_ptr, row, column, inside, stride_part, stride_row,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NUM_HELD: tl.constexpr,
):  # fmt: skip
    """Return the bias and the sum of a row's parts, [BLOCK] float32."""
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(PARTS):
        # Loaded whether it counts or not, so that no load waits for another.
        at = row * stride_row + number * stride_part.to(tl.int64) + column
        part = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if experts_ptr is not None:
            pair = row * PARTS + number
            is_held = tl.load(experts_ptr + pair) < NUM_HELD
            part = tl.where(is_held, part, 0.0) * tl.load(weights_ptr + pair)
        total += part
    return total


@triton.jit
def _sum_parts_kernel(
    parts_ptr, experts_ptr, weights_ptr, bias_ptr, out_ptr, num_columns, stride_part, stride_row, stride_out,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NUM_HELD: tl.constexpr, ACTIVATION: tl.constexpr,
    ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / BLOCK), rows). Adds up a row's parts from the first to the last.

    With experts_ptr, parts are weighted, and those of experts from NUM_HELD on count as 0.
    """
    start_next(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    wait_for_previous(OVERLAP)
    out = _sum_parts(
        parts_ptr, experts_ptr, weights_ptr, bias_ptr, row, column, inside, stride_part, stride_row,
        PARTS, BLOCK, NUM_HELD,
    )  # fmt: skip
    if ACTIVATION is not None:
        up = _sum_parts(
            parts_ptr, experts_ptr, weights_ptr, bias_ptr, row, column + num_columns, inside, stride_part,
            stride_row, PARTS, BLOCK, NUM_HELD,
        )  # fmt: skip
        out = activate(out, ACTIVATION) * up
    out_at = out_ptr + row * stride_out + column
    if ADD:
        out += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
