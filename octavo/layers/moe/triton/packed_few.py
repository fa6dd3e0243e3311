"""Packed experts of 1 to 4 tokens: every pair by itself; imported only where Triton runs.

    programs     of gate and up (tile of columns, pair); of down (tile of columns, token)
    a program    reads its tile of an expert's weight, or of all experts', a few parts side by side

    sum of (scale q + min) x over a group = scale (sum of (q + o) x - o sum of x) + min sum of x

q + o, a 16-bit float, is put together of bits, and tensor cores add up both sums: no weight is scaled alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gpu.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.layers.linear.grouped.dequantise import halves_of
from octavo.layers.moe.packed_weight import PackedExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import PackedTiling
from octavo.layers.moe.triton.tile import store_tile, tile_weight_rows


def few_gate_up(
    x: Tensor,
    weight: PackedExpertWeight,
    experts: Tensor,
    activation: str,
    tiling: PackedTiling,
    *,
    skips: bool = False,
) -> Tensor:
    """Return the activation of every pair's gate and up; see few.few_gate_up."""
    num_experts, num_weight_rows, _ = weight.shape
    num_columns = num_weight_rows // 2
    out = x.new_empty(experts.numel(), num_columns)
    launch(
        _gate_up_kernel,
        (-(-num_columns // (tiling.columns // 2)), experts.numel()),
        *_tensors(x, weight, experts),
        *(out, num_columns, x.stride(0), experts.shape[1], activation),
        *_form(weight, tiling),
        num_experts if skips else None,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def few_down(
    x: Tensor,
    weight: PackedExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: PackedTiling,
    *,
    skips: bool = False,
) -> Tensor:
    """Return the sums of each token's products times its weights; see few.few_down."""
    (num_tokens, num_chosen), (num_experts, num_columns, _) = choice.experts.shape, weight.shape
    out = x.new_empty(num_tokens, num_columns) if residual is None else residual
    launch(
        _down_kernel,
        (-(-num_columns // tiling.columns), num_tokens),
        *_tensors(x, weight, choice.experts),
        *(choice.weights, out, num_columns, out.stride(0), num_chosen, residual is not None),
        *(min(tiling.parts, triton.next_power_of_2(num_chosen)), *_form(weight, tiling)),
        num_experts if skips else None,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def _tensors(x: Tensor, weight: PackedExpertWeight, experts: Tensor) -> tuple[Tensor, ...]:
    """Return what both kernels read; without an order its pointer is not read."""
    order = experts if weight.order is None else weight.order
    return x, weight.words, weight.pairs, weight.factors, order, experts


def _form(weight: PackedExpertWeight, tiling: PackedTiling) -> tuple[int | bool, ...]:
    """Return what both kernels are compiled for."""
    form = weight.size, weight.bits, weight.group, weight.order is not None
    return *form, tiling.rows, tiling.columns, tiling.parts, tiling.num_stages


@triton.constexpr_function
def _bits_asm(shift):
    """Return PTX for two numbers of 4 bits as bfloat16, 128 larger."""
    # 0xEA: (a and b) or c.
    return (
        f"{{ .reg .b32 bits; shr.u32 bits, $1, {shift}; lop3.b32 $0, bits, 0x000F000F, 0x43004300, 0xEA; }}"
    )


@triton.constexpr_function
def _offset(bits, is_bfloat16):
    return 128.0 if bits == 4 and is_bfloat16 else 0.0


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


@triton.jit
def _sum_group(
    x_at, order_at, k, words, FIRST: tl.constexpr, PLANES: tl.constexpr, SIZE: tl.constexpr,
    BITS: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums over a group of each part: of q x and of x, [P, C, R] float32, x in every row.

    Args:
        x_at: pointers to a part's row, [P].
        order_at: pointers to the columns of x for each k, [P], if ORDERED.
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
            column = tl.load(order_at[:, None] + column, mask=inside, other=0)
        x = tl.load(x_at[:, None] + column, mask=inside, other=0.0)
        x = tl.broadcast_to(x[:, :, None], [PARTS, 32, ROWS])
        values = tl.reshape(_raised(words, FIRST + plane, BITS, DTYPE), [PARTS, COLUMNS, 32])
        products = tl.dot(values, x, products)
        sums = tl.dot(ones, x, sums)
    return products - OFFSET * sums, sums


@triton.jit
def _sum_parts(
    x_at, order_at, words_ptr, pairs_ptr, expert, weight_row, num_weight_rows, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products of each part, [P, C, R] float32; SPLITS neighbouring parts share the spans of K.

    Args:
        x_at, order_at: see _sum_group.
        expert: int64, [P C] or a scalar.
        weight_row: [P C].
    """
    SPAN: tl.constexpr = 32 * 32 // BITS
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    GROUPS: tl.constexpr = SPAN // GROUP
    split = tl.arange(0, PARTS * COLUMNS) // COLUMNS % SPLITS
    words_at = words_ptr + ((expert * num_weight_rows + weight_row) * (SPANS * 32))[:, None]
    words_at += tl.arange(0, 32)[None, :]
    pairs_at = pairs_ptr + expert * (SPANS * GROUPS) * num_weight_rows + weight_row
    total = tl.zeros([PARTS, COLUMNS, ROWS], tl.float32)
    for span in tl.range(0, SPANS, SPLITS, num_stages=STAGES):
        # Past the end the last span is read again, and meets zeros.
        own = tl.minimum(span + split, SPANS - 1)
        words = tl.load(words_at + (own * 32)[:, None])
        for group in tl.static_range(GROUPS):
            both = tl.load(pairs_at + (own * GROUPS + group) * num_weight_rows)
            scale, low = halves_of(tl.reshape(both, [PARTS, COLUMNS, 1]))
            products, sums = _sum_group(
                x_at, order_at, (span + tl.arange(0, PARTS) % SPLITS) * SPAN + group * GROUP, words,
                group * (GROUP // 32), GROUP // 32, SIZE, BITS, ORDERED, ROWS, COLUMNS,
            )  # fmt: skip
            total += scale * products + low * sums
    return total


@triton.jit(do_not_specialize=["num_chosen"])
def _gate_up_kernel(
    x_ptr, words_ptr, pairs_ptr, factors_ptr, order_ptr, experts_ptr, out_ptr,
    num_columns, stride_x, num_chosen, ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, pairs). Parts of a program share K; its rows of the weight are gate and up."""
    OWN: tl.constexpr = COLUMNS // 2
    start_next(OVERLAP)
    weight_row = tile_weight_rows(tl.arange(0, PARTS * COLUMNS) % COLUMNS, num_columns, COLUMNS, 2)
    wait_for_previous(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    is_held = True
    if NUM_HELD is not None:
        is_held = expert < NUM_HELD
    if is_held:
        part = tl.zeros([PARTS], tl.int64)
        total = _sum_parts(
            x_ptr + part + (pair // num_chosen).to(tl.int64) * stride_x, order_ptr + part + expert * SIZE,
            words_ptr, pairs_ptr, expert, weight_row, 2 * num_columns, PARTS,
            SIZE, BITS, GROUP, ORDERED, ROWS, COLUMNS, PARTS, STAGES,
        )  # fmt: skip
        factor = tl.load(factors_ptr + expert * 2 + tl.arange(0, COLUMNS) // OWN)
        sums = tl.reshape(tl.sum(total, axis=0) * factor[:, None], [2, OWN, ROWS])
        gate, up = tl.split(tl.permute(sums, (1, 2, 0)))
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        row = tl.arange(0, ROWS)
        store_tile(gate, up, None, column, out_ptr, pair + row, row < 1, column, num_columns, ACTIVATION)


@triton.jit
def _down_kernel(
    x_ptr, words_ptr, pairs_ptr, factors_ptr, order_ptr, experts_ptr, weights_ptr, out_ptr,
    num_columns, stride_out, NUM_CHOSEN: tl.constexpr, ADD: tl.constexpr, EXPERTS: tl.constexpr,
    SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, tokens). Parts of a program are EXPERTS experts, times parts of K."""
    SPLITS: tl.constexpr = PARTS // EXPERTS
    start_next(OVERLAP)
    part = tl.arange(0, PARTS) // SPLITS
    part_of_row = tl.arange(0, PARTS * COLUMNS) // COLUMNS // SPLITS
    weight_row = tile_weight_rows(tl.arange(0, PARTS * COLUMNS) % COLUMNS, num_columns, COLUMNS, 1)
    wait_for_previous(OVERLAP)
    first_pair = tl.program_id(1) * NUM_CHOSEN
    result = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in tl.static_range(0, NUM_CHOSEN, EXPERTS):
        pair = first_pair + tl.minimum(first + part, NUM_CHOSEN - 1)
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        expert_of_row = tl.load(experts_ptr + first_pair + tl.minimum(first + part_of_row, NUM_CHOSEN - 1))
        factor = tl.load(weights_ptr + pair)
        is_added = first + part < NUM_CHOSEN
        if NUM_HELD is not None:
            # What is elsewhere is read as the last expert here, and not added.
            is_added &= expert < NUM_HELD
            expert = tl.minimum(expert, NUM_HELD - 1)
            expert_of_row = tl.minimum(expert_of_row, NUM_HELD - 1)
        factor *= tl.load(factors_ptr + expert)
        total = _sum_parts(
            x_ptr + pair.to(tl.int64) * SIZE, order_ptr + expert * SIZE,
            words_ptr, pairs_ptr, expert_of_row.to(tl.int64), weight_row, num_columns, SPLITS,
            SIZE, BITS, GROUP, ORDERED, ROWS, COLUMNS, PARTS, STAGES,
        )  # fmt: skip
        result += tl.sum(tl.where(is_added[:, None, None], total * factor[:, None, None], 0.0), axis=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    at = out_ptr + tl.program_id(1).to(tl.int64) * stride_out + column[:, None] + 0 * row[None, :]
    inside = (column < num_columns)[:, None] & (row < 1)[None, :]
    if ADD:
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)
