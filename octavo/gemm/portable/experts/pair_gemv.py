"""The GEMV of experts in floats, for 1 to 4 tokens, without tensor cores; imported only where Triton runs.

Those tokens mostly choose different experts, so there is nothing to sort. Reading weights and launching take
all the time: the activation is part of the first product, the sum over a token's experts of the second.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.skinny_tiling import Tiling
from octavo.kernels.activation import gate_and_up
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def pair_gate_up(
    x: Tensor,
    weight: ExpertWeight,
    experts: Tensor,
    activation: str,
    tiling: Tiling,
) -> Tensor:
    """Return activation(gate) * up of every pair; sums are float32.

    Args:
        x: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [E, 2 n, K] = [gate | up].
        experts: [T, k] int32, contiguous; no weight is read for E, see Choice.
        activation: its name; see kernels.activation.
        tiling: columns count rows of the weight, gate and up.

    Returns:
        A new [T k, n], dtype of x.
    """
    out = x.new_empty(experts.numel(), weight.shape[1] // 2)
    _launch(x, weight, experts, None, out, tiling, summed=1, activation=activation, adds=False)
    return out


def pair_down(
    x: Tensor,
    weight: ExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """Return the sums of each token's products times its weights; sums are float32.

    Args:
        x: [T k, n] of pair_gate_up.
        weight: [E, H, n].
        choice: each token's experts and their weights, contiguous; pairs of E are not in the sums.
        residual: [T, H], rows any stride apart: the sums are added to it in place; or None.
        tiling: of a program; depth is at most that of a row.

    Returns:
        residual, or a new [T, H], dtype of x.
    """
    out = x.new_empty(len(choice.experts), weight.shape[1]) if residual is None else residual
    summed = choice.experts.shape[1]
    _launch(x, weight, *choice, out, tiling, summed=summed, activation=None, adds=residual is not None)
    return out


def _launch(
    x: Tensor,
    weight: ExpertWeight,
    experts: Tensor,
    factors: Tensor | None,
    out: Tensor,
    tiling: Tiling,
    *,
    summed: int,
    activation: str | None,
    adds: bool,
) -> None:
    """Write the sums over `summed` pairs each to rows of out."""
    num_experts, num_weight_rows, size = weight.shape
    launch(
        _gemv_kernel,
        (-(-num_weight_rows // tiling.columns), len(out)),
        x_ptr=x,
        weight_ptr=weight.values,
        scales_ptr=weight.values if weight.scales is None else weight.scales,
        bias_ptr=weight.bias,
        experts_ptr=experts,
        factors_ptr=factors,
        out_ptr=out,
        num_weight_rows=num_weight_rows,
        stride_x=x.stride(0),
        stride_out=out.stride(0),
        WIDTH=weight.width,
        SUMMED=summed,
        NUM_CHOSEN=experts.numel() // len(x),
        SIZE=size,
        ACTIVATION=activation,
        ADD=adds,
        COLUMNS=tiling.columns,
        DEPTH=min(tiling.depth, max(16, power_of_two(size))),
        NUM_HELD=num_experts,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )


@triton.jit
def _fold(values, LENGTH: tl.constexpr):
    """Add up groups of LENGTH along the last dimension: [C, D] to [C, D / LENGTH]."""
    return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // LENGTH, LENGTH]), axis=2)


@triton.jit
def _scaled(
    products, scales_ptr, expert, weight_row, num_rows, start,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Multiply sums of VECTOR products [C, n] of an expert's weight, from `start` on, by their scales."""
    if WIDTH == 0:
        return products
    else:
        PARTS: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
        # Beyond K products are 0, but must not become NaN.
        part = tl.minimum((start + VECTOR * tl.arange(0, products.shape[1])) // WIDTH, PARTS - 1)
        at = (expert * PARTS + part[None, :]) * num_rows + weight_row[:, None]
        return products * tl.load(scales_ptr + at)


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, experts_ptr, factors_ptr, out_ptr,
    num_weight_rows, stride_x, stride_out,
    WIDTH: tl.constexpr, SUMMED: tl.constexpr, NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(N / COLUMNS), rows of the result). A program sums over SUMMED pairs in their order.

    Pair p has row p // NUM_CHOSEN of x. With an activation, gate and up columns alternate in a program.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    # Products of what one thread loads at once, 16 bytes, are added up at once: fewer sums in registers.
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    start_next(OVERLAP)
    num_columns = num_weight_rows // HALVES
    row = tl.program_id(1)
    index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)[None, :]
    # Columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(index // HALVES, num_columns - 1) + index % HALVES * num_columns
    wait_for_previous(OVERLAP)
    sums = tl.zeros([COLUMNS, DEPTH // VECTOR], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(SUMMED):
        pair = row * SUMMED + number
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        is_held = expert < NUM_HELD
        num_k = tl.where(is_held, SIZE, 0)
        # Scales are read all the same.
        expert = tl.minimum(expert, NUM_HELD - 1)
        weight_at = weight_ptr + (expert * num_weight_rows + weight_row)[:, None] * SIZE + k
        x_at = x_ptr + (pair // NUM_CHOSEN).to(tl.int64) * stride_x + k
        if factors_ptr is not None:
            factor = tl.load(factors_ptr + pair)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * num_weight_rows + weight_row, mask=is_held, other=0.0)
            biases += bias.to(tl.float32) if factors_ptr is None else factor * bias.to(tl.float32)
        weight = tl.load(weight_at, mask=k < num_k, other=0.0)
        for start in range(0, SIZE, DEPTH):
            next_weight = tl.load(weight_at + start + DEPTH, mask=start + DEPTH + k < num_k, other=0.0)
            # Rows of pairs that are not held here were never written.
            is_x = start + k < (SIZE if factors_ptr is None else num_k)
            x = tl.load(x_at + start, mask=is_x, other=0.0).to(tl.float32)
            products = _fold(weight.to(tl.float32) * x, VECTOR)
            if factors_ptr is not None:
                products *= factor
            sums += _scaled(
                products, scales_ptr, expert, weight_row, num_weight_rows, start, SIZE, WIDTH, VECTOR
            )  # fmt: skip
            weight = next_weight
    total = tl.sum(sums, axis=1) + biases
    column = index
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, [COLUMNS // 2, 2]))
        total = gate_and_up(gate, up, ACTIVATION)
        column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    inside = column < num_columns
    out_at = out_ptr + row.to(tl.int64) * stride_out + column
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)
