"""MXFP4 experts of 1 to 4 tokens, without tensor cores; imported only where Triton runs.

Every pair by itself, as in few, but a thread loads a block, 16 bytes: 32 products are added up before they
meet their scale.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gpu.device import power_of_two
from octavo.gpu.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.layers.linear.skinny_tiling import Tiling
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.triton.mxfp4 import UNITS, first_columns, numbers, powers
from octavo.layers.triton.activation import gate_and_up

# Half of the 2 ** 126 by which numbers are too small: x is so much larger, and scales are.
_SHIFT = tl.constexpr(63)
_FACTOR = tl.constexpr(2.0**63)


def few_gate_up(
    x: Tensor, weight: Mxfp4ExpertWeight, experts: Tensor, activation: str, tiling: Tiling
) -> Tensor:
    """Return the activation of every pair's gate and up; see few.few_gate_up."""
    _, num_weight_rows, num_units = weight.values.shape
    num_pairs = experts.numel()
    out = x.new_empty(num_pairs, num_weight_rows // 2)
    launch(
        _few_gate_up_kernel,
        (-(-num_weight_rows // tiling.columns), num_pairs),
        *(x, weight.values, weight.exponents, weight.bias, experts, out, num_weight_rows, x.stride(0)),
        *(experts.shape[1], num_units, activation, tiling.columns, _depth(tiling, num_units)),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def few_down(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, residual: Tensor | None, tiling: Tiling
) -> Tensor:
    """Return the sums of each token's products times its weights; see few.few_down."""
    (num_tokens, num_chosen), (_, num_columns, num_units) = choice.experts.shape, weight.values.shape
    out = x.new_empty(num_tokens, num_columns) if residual is None else residual
    launch(
        _few_down_kernel,
        (-(-num_columns // tiling.columns), num_tokens),
        *(x, weight.values, weight.exponents, weight.bias, *choice, out, num_columns),
        *(out.stride(0), num_chosen, num_units, tiling.columns, _depth(tiling, num_units)),
        residual is not None,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def _depth(tiling: Tiling, num_units: int) -> int:
    """Units of a row that a program loads at once; a tiling's depth counts numbers."""
    return min(tiling.depth // 4, max(UNITS.value, power_of_two(num_units)))


@triton.jit
def _block_sums(units, exponents, x_at, inside):
    """Return the sums of blocks [C, D / UNITS], with units [C, D] of weights and columns of x at x_at [1, D].

    x gets the factor: with products of numbers it would cost an instruction each.
    """
    products = tl.zeros(units.shape, tl.float32)
    for plane in tl.static_range(4):
        x = tl.load(x_at + plane * UNITS, mask=inside, other=0.0).to(tl.float32) * _FACTOR
        products += numbers(units, plane, tl.float32) * x
    blocks = tl.reshape(products, [units.shape[0], units.shape[1] // UNITS, UNITS])
    return tl.sum(blocks, axis=2) * powers(exponents, _SHIFT)


@triton.jit
def _few_gate_up_kernel(
    x_ptr, values_ptr, exponents_ptr, bias_ptr, experts_ptr, out_ptr, num_weight_rows, stride_x,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(2 n / COLUMNS), pairs). Gate and up columns alternate; SIZE and DEPTH count units."""
    start_next(OVERLAP)
    num_columns = num_weight_rows // 2
    pair = tl.program_id(1)
    index = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.arange(0, DEPTH)[None, :]
    block = tl.arange(0, DEPTH // UNITS)[None, :]
    weight_row = tl.minimum(index // 2, num_columns - 1) + index % 2 * num_columns
    x_at = x_ptr + (pair // NUM_CHOSEN).to(tl.int64) * stride_x + first_columns(unit)
    wait_for_previous(OVERLAP)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    row = (expert * num_weight_rows + weight_row)[:, None]
    values_at = values_ptr + row * SIZE + unit
    exponents_at = exponents_ptr + row * (SIZE // UNITS) + block
    values = tl.load(values_at, mask=unit < SIZE, other=0)
    sums = tl.zeros([COLUMNS, DEPTH // UNITS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        next_values = tl.load(values_at + start + DEPTH, mask=start + DEPTH + unit < SIZE, other=0)
        is_block = start // UNITS + block < SIZE // UNITS
        exponents = tl.load(exponents_at + start // UNITS, mask=is_block, other=0)
        sums += _block_sums(values, exponents, x_at + 4 * start, start + unit < SIZE)
        values = next_values
    total = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * num_weight_rows + weight_row).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, [COLUMNS // 2, 2]))
    column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    out = gate_and_up(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * num_columns + column, out, mask=column < num_columns)


@triton.jit
def _few_down_kernel(
    x_ptr, values_ptr, exponents_ptr, bias_ptr, experts_ptr, weights_ptr, out_ptr, num_columns, stride_out,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(H / COLUMNS), T). A program sums over its token's experts in their order."""
    start_next(OVERLAP)
    token = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    weight_row = tl.minimum(column, num_columns - 1)
    unit = tl.arange(0, DEPTH)[None, :]
    block = tl.arange(0, DEPTH // UNITS)[None, :]
    wait_for_previous(OVERLAP)
    sums = tl.zeros([COLUMNS, DEPTH // UNITS], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + number
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        factor = tl.load(weights_ptr + pair)
        row = expert * num_columns + weight_row
        if bias_ptr is not None:
            biases += factor * tl.load(bias_ptr + row).to(tl.float32)
        values_at = values_ptr + row[:, None] * SIZE + unit
        exponents_at = exponents_ptr + row[:, None] * (SIZE // UNITS) + block
        x_at = x_ptr + pair.to(tl.int64) * (4 * SIZE) + first_columns(unit)
        for start in range(0, SIZE, DEPTH):
            is_unit = start + unit < SIZE
            values = tl.load(values_at + start, mask=is_unit, other=0)
            is_block = start // UNITS + block < SIZE // UNITS
            exponents = tl.load(exponents_at + start // UNITS, mask=is_block, other=0)
            sums += _block_sums(values, exponents, x_at + 4 * start, is_unit) * factor
    total = tl.sum(sums, axis=1) + biases
    out_at = out_ptr + token.to(tl.int64) * stride_out + column
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)
