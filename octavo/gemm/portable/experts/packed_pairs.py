"""Packed experts of 1 to 4 tokens: every pair by itself; imported only where Triton runs.

    programs     (tile of columns, pair)
    a program    reads its tile of the expert's weight, parts of K side by side, a span of columns each

    sum of (scale q + min) x over a group = scale (sum of (q + o) x - o sum of x) + min sum of x

q + o, a 16-bit float, is put together of bits, and tensor cores add up both sums: no weight is scaled alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.combine import combine_rows
from octavo.gemm.portable.experts.expert_tile import store_tile, tile_weight_rows
from octavo.gemm.portable.experts.expert_tiling import PackedTiling
from octavo.gemm.portable.packed.dequantise import halves_of
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def few_gate_up(
    x: Tensor,
    weight: PackedExpertWeight,
    experts: Tensor,
    activation: str,
    tiling: PackedTiling,
) -> Tensor:
    """Return the activation of every pair's gate and up; see pairs.few_gate_up."""
    return _launch(x, weight, experts, experts.shape[1], activation, tiling)


def few_down(
    x: Tensor,
    weight: PackedExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: PackedTiling,
) -> Tensor:
    """Return the sums of each token's products times its weights; see few.few_down."""
    rows = _launch(x, weight, choice.experts, 1, None, tiling)
    return combine_rows(rows, choice, residual, num_held=weight.shape[0])


def _launch(
    x: Tensor,
    weight: PackedExpertWeight,
    experts: Tensor,
    num_chosen: int,
    activation: str | None,
    tiling: PackedTiling,
) -> Tensor:
    """Return every pair's row; x has a row for num_chosen pairs."""
    num_experts, num_weight_rows, size = weight.shape
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    out = x.new_empty(experts.numel(), num_columns)
    order = weight.order
    launch(
        _packed_few_kernel,
        (-(-num_columns // (tiling.columns // halves)), experts.numel()),
        x_ptr=x,
        words_ptr=weight.words,
        pairs_ptr=weight.pairs,
        factors_ptr=weight.factors,
        order_ptr=experts if order is None else order,
        out_ptr=out,
        experts_ptr=experts,
        num_columns=num_columns,
        stride_x=x.stride(0),
        num_chosen=num_chosen,
        SIZE=size,
        BITS=weight.bits,
        GROUP=weight.group,
        ORDERED=order is not None,
        ACTIVATION=activation,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        PARTS=tiling.parts,
        STAGES=tiling.num_stages,
        NUM_HELD=num_experts,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.constexpr_function
def _bits_asm(shift):
    """Return PTX for two numbers of 4 bits as bfloat16, 128 larger."""
    # 0xEA: (a and b) or c.
    return (
        f"{{ .reg .b32 bits; shr.u32 bits, $1, {shift}; lop3.b32 $0, bits, 0x000F000F, 0x43004300, 0xEA; }}"
    )


@triton.jit
def _raised(words, PLANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return a plane of words as floats: q + _offset."""
    if BITS == 8:
        return (words << (24 - 8 * PLANE) >> 24).to(tl.float32).to(DTYPE)
    elif DTYPE.is_bf16():
        half = (words if PLANE < 4 else words >> 16).to(tl.int16)
        return tl.inline_asm_elementwise(
            _bits_asm(PLANE % 4 * 4), "=r,r", [half], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return (words >> 4 * PLANE & 15).to(tl.float32).to(DTYPE)


@triton.constexpr_function
def _offset(bits, is_bfloat16):
    return 128.0 if bits == 4 and is_bfloat16 else 0.0


@triton.jit
def _sum_group(
    x_at, order_ptr, k, words, FIRST: tl.constexpr, PLANES: tl.constexpr, SIZE: tl.constexpr,
    BITS: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums over a group of parts of K: of q x and of x, [P, C, R] float32, x in every row.

    Args:
        x_at: pointer to a row.
        order_ptr: column of x for each k, if ORDERED.
        k: of the group in each part, [P].
        words: of the parts' spans, [P C, 32].
        FIRST: plane of the group.
    """
    PARTS: tl.constexpr = k.shape[0]
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    OFFSET: tl.constexpr = _offset(BITS, DTYPE.is_bf16())
    ones = tl.full([PARTS, COLUMNS, 32], 1.0, DTYPE)
    products = tl.zeros([PARTS, COLUMNS, ROWS], tl.float32)
    sums = products
    for plane in tl.static_range(PLANES):
        column = k[:, None] + (plane * 32 + tl.arange(0, 32))[None, :]
        inside = column < SIZE
        if ORDERED:
            column = tl.load(order_ptr + column, mask=inside, other=0)
        x = tl.load(x_at + column, mask=inside, other=0.0)
        x = tl.broadcast_to(x[:, :, None], [PARTS, 32, ROWS])
        values = tl.reshape(_raised(words, FIRST + plane, BITS, DTYPE), [PARTS, COLUMNS, 32])
        products = tl.dot(values, x, products)
        sums = tl.dot(ones, x, sums)
    return products - OFFSET * sums, sums


@triton.jit(do_not_specialize=["num_chosen"])
def _packed_few_kernel(
    x_ptr, words_ptr, pairs_ptr, factors_ptr, order_ptr, out_ptr, experts_ptr,
    num_columns, stride_x, num_chosen,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, pairs). With an activation a program's rows of the weight are gate and up."""
    SPAN: tl.constexpr = 32 * 32 // BITS
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    PLANES: tl.constexpr = GROUP // 32
    GROUPS: tl.constexpr = SPAN // GROUP
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    OWN: tl.constexpr = COLUMNS // HALVES
    start_next(OVERLAP)
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, PARTS * COLUMNS)
    part = tl.arange(0, PARTS)
    weight_row = tile_weight_rows(index % COLUMNS, num_columns, COLUMNS, HALVES)
    wait_for_previous(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < NUM_HELD:
        words_at = (
            words_ptr + ((expert * num_weight_rows + weight_row) * SPANS + index // COLUMNS)[:, None] * 32
        )
        words_at += tl.arange(0, 32)[None, :]
        pairs_at = pairs_ptr + expert * SPANS * GROUPS * num_weight_rows + weight_row
        x_at = x_ptr + (pair // num_chosen).to(tl.int64) * stride_x
        total = tl.zeros([PARTS, COLUMNS, ROWS], tl.float32)
        for span in tl.range(0, SPANS, PARTS, num_stages=STAGES):
            # Past the end the last span is read again, and meets zeros.
            past = tl.maximum(span + index // COLUMNS - (SPANS - 1), 0)
            words = tl.load(words_at + (span - past)[:, None] * 32)
            for group in tl.static_range(GROUPS):
                of_group = (span + index // COLUMNS - past) * GROUPS + group
                both = tl.load(pairs_at + of_group * num_weight_rows)
                scale, low = halves_of(tl.reshape(both, [PARTS, COLUMNS, 1]))
                products, sums = _sum_group(
                    x_at, order_ptr + expert * SIZE, (span + part) * SPAN + group * GROUP, words,
                    group * PLANES, PLANES, SIZE, BITS, ORDERED, ROWS, COLUMNS,
                )  # fmt: skip
                total += scale * products + low * sums
        factor = tl.load(factors_ptr + expert * HALVES + tl.arange(0, COLUMNS) // OWN)
        result = tl.sum(total, axis=0) * factor[:, None]
        up = result
        if HALVES == 2:
            result, up = tl.split(tl.permute(tl.reshape(result, [2, OWN, ROWS]), (1, 2, 0)))
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        row = tl.arange(0, ROWS)
        store_tile(result, up, None, column, out_ptr, pair + row, row < 1, column, num_columns, ACTIVATION)
