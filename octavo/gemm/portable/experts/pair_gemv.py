"""Experts of 1 to 4 tokens: every pair by itself, without tensor cores; imported only where Triton runs.

So few tokens mostly choose different experts, so there is nothing to sort. Time is that of reading weights
and of launches: the activation is part of the first product, the sum over a token's experts of the second.
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


def few_gate_up(
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
    num_experts, num_weight_rows, size = weight.shape
    num_pairs = experts.numel()
    out = x.new_empty(num_pairs, num_weight_rows // 2)
    launch(
        _few_gate_up_kernel,
        (-(-num_weight_rows // tiling.columns), num_pairs),
        *(x, weight.values, _scales_of(weight), weight.bias, experts, out, num_weight_rows, x.stride(0)),
        *(weight.width, experts.shape[1], size, activation, tiling.columns, _depth(tiling, size)),
        num_experts,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def few_down(
    x: Tensor,
    weight: ExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """Return the sums of each token's products times its weights; sums are float32.

    Args:
        x: [T k, n] of few_gate_up.
        weight: [E, H, n].
        choice: each token's experts and their weights, contiguous; pairs of E are not in the sums.
        residual: [T, H], rows any stride apart: the sums are added to it in place; or None.
        tiling: of a program; depth is at most that of a row.

    Returns:
        residual, or a new [T, H], dtype of x.
    """
    (num_tokens, num_chosen), (num_experts, num_columns, size) = choice.experts.shape, weight.shape
    out = x.new_empty(num_tokens, num_columns) if residual is None else residual
    launch(
        _few_down_kernel,
        (-(-num_columns // tiling.columns), num_tokens),
        *(x, weight.values, _scales_of(weight), weight.bias, *choice, out, num_columns, out.stride(0)),
        *(weight.width, num_chosen, size, tiling.columns, _depth(tiling, size)),
        *(num_experts, residual is not None),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def _depth(tiling: Tiling, size: int) -> int:
    """Return the values of K that a program loads at once."""
    return min(tiling.depth, max(16, power_of_two(size)))


def _scales_of(weight: ExpertWeight) -> Tensor:
    """Return what a kernel gets for scales; without any, it does not read it."""
    return weight.values if weight.scales is None else weight.scales


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
def _few_gate_up_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, experts_ptr, out_ptr, num_weight_rows, stride_x,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(2 n / COLUMNS), pairs). Gate and up columns alternate in a program."""
    # Products of what one thread loads at once, 16 bytes, are added up at once: fewer sums in registers.
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    start_next(OVERLAP)
    num_columns = num_weight_rows // 2
    pair = tl.program_id(1)
    index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)[None, :]
    weight_row = tl.minimum(index // 2, num_columns - 1) + index % 2 * num_columns
    x_at = x_ptr + (pair // NUM_CHOSEN).to(tl.int64) * stride_x + k
    wait_for_previous(OVERLAP)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    is_held = expert < NUM_HELD
    num_k = tl.where(is_held, SIZE, 0)
    # Scales are read all the same.
    expert = tl.minimum(expert, NUM_HELD - 1)
    weight_at = weight_ptr + (expert * num_weight_rows + weight_row)[:, None] * SIZE + k
    weight = tl.load(weight_at, mask=k < num_k, other=0.0)
    sums = tl.zeros([COLUMNS, DEPTH // VECTOR], tl.float32)
    for start in range(0, SIZE, DEPTH):
        next_weight = tl.load(weight_at + start + DEPTH, mask=start + DEPTH + k < num_k, other=0.0)
        x = tl.load(x_at + start, mask=start + k < SIZE, other=0.0).to(tl.float32)
        products = _fold(weight.to(tl.float32) * x, VECTOR)
        sums += _scaled(products, scales_ptr, expert, weight_row, num_weight_rows, start, SIZE, WIDTH, VECTOR)
        weight = next_weight
    total = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * num_weight_rows + weight_row, mask=is_held, other=0.0)
        total += bias.to(tl.float32)
    gate, up = tl.split(tl.reshape(total, [COLUMNS // 2, 2]))
    out = gate_and_up(gate, up, ACTIVATION)
    column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    out_at = out_ptr + pair.to(tl.int64) * num_columns + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=column < num_columns)


@triton.jit
def _few_down_kernel(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr, num_columns, stride_out,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    NUM_HELD: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(H / COLUMNS), T). A program sums over its token's experts in their order."""
    VECTOR: tl.constexpr = 128 // weight_ptr.dtype.element_ty.primitive_bitwidth
    start_next(OVERLAP)
    token = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    weight_row = tl.minimum(column, num_columns - 1)
    k = tl.arange(0, DEPTH)[None, :]
    wait_for_previous(OVERLAP)
    sums = tl.zeros([COLUMNS, DEPTH // VECTOR], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + number
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        is_held = expert < NUM_HELD
        num_k = tl.where(is_held, SIZE, 0)
        # Scales are read all the same.
        expert = tl.minimum(expert, NUM_HELD - 1)
        weight_at = weight_ptr + (expert * num_columns + weight_row)[:, None] * SIZE + k
        x_at = x_ptr + pair.to(tl.int64) * SIZE + k
        factor = tl.load(weights_ptr + pair)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * num_columns + weight_row, mask=is_held, other=0.0)
            biases += factor * bias.to(tl.float32)
        for start in range(0, SIZE, DEPTH):
            is_k = start + k < num_k
            weight = tl.load(weight_at + start, mask=is_k, other=0.0).to(tl.float32)
            x = tl.load(x_at + start, mask=is_k, other=0.0).to(tl.float32)
            products = _fold(weight * x, VECTOR) * factor
            sums += _scaled(products, scales_ptr, expert, weight_row, num_columns, start, SIZE, WIDTH, VECTOR)
    total = tl.sum(sums, axis=1) + biases
    out_at = out_ptr + token.to(tl.int64) * stride_out + column
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)
