"""Tiles of packed experts as operands of the grouped GEMM; imported only where Triton runs.

A program reads a span of words at a time; each plane of them, unpacked in registers, meets its 32 columns of
x. For tiles of rows weights are scaled, too. For a single row the sums of a group are:

    sum of (scale q + min) x over a group = scale (sum of (q + o) x - o sum of x) + min sum of x

q + o, a 16-bit float, is put together of bits, and tensor cores add up both sums.
"""

import triton
import triton.language as tl

from octavo.gemm.portable.experts.expert_tile import gate_of, tile_weight_rows
from octavo.gemm.portable.packed.dequantise import halves_of, read_pair, scaled


@triton.jit
def place_packed(
    weight, expert, num_columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return pointers to a program's words [C, 32] and pairs [C, 1], its factors [C], and its order's."""
    SPAN: tl.constexpr = 32 * 32 // BITS
    NUM_SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    words_ptr, pairs_ptr, factors_ptr, order_ptr = weight
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, COLUMNS)
    row = tile_weight_rows(index, num_columns, COLUMNS, HALVES)
    words_at = words_ptr + (expert * num_weight_rows + row)[:, None] * (NUM_SPANS * 32)
    words_at += tl.arange(0, 32)[None, :]
    pairs_at = pairs_ptr + expert * (NUM_SPANS * SPAN // GROUP) * num_weight_rows + row[:, None]
    factor = tl.load(factors_ptr + expert * HALVES + index // (COLUMNS // HALVES))
    return words_at, pairs_at, factor, _place_order(order_ptr, expert, SIZE)


@triton.jit
def _place_order(order_ptr, expert, SIZE: tl.constexpr):
    """Return a pointer to an expert's order, the column of x for each k, in a tuple; () if it has none."""
    order_at = ()
    if order_ptr is not None:
        order_at = (order_ptr + expert * SIZE,)
    return order_at


@triton.jit
def sum_packed(
    place, x_ptr, x_row, is_row, stride_x, num_columns, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the products of gate and of up [COLUMNS / HALVES, ROWS]; see grouped_gemm.

    The launch sets the stages of the loop. Set on the loop itself, they would apply to the order of columns,
    too, which takes up to 60 more registers.
    """
    SPAN: tl.constexpr = 32 * 32 // BITS
    NUM_SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    PLANES: tl.constexpr = GROUP // 32 if GROUP > 32 else 1
    words_at, pairs_at, factor, order_at = place
    num_weight_rows = num_columns * HALVES
    j = tl.arange(0, 32)
    x_at = x_ptr + (x_row * stride_x)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for span in range(NUM_SPANS):
        words = tl.load(words_at + span * 32)
        for group in tl.static_range(SPAN // (GROUP if GROUP > 32 else 32)):
            k = span * SPAN + group * PLANES * 32
            of_group = ((k + j) // GROUP)[None, :] if GROUP < 32 else k // GROUP
            scale, low = read_pair(tl.load(pairs_at + of_group * num_weight_rows), BITS)
            for plane in tl.static_range(PLANES):
                x = _load_plane(x_at, order_at, is_row, k + plane * 32, SIZE)
                values = _values(words, group * PLANES + plane, scale, low, BITS, x.dtype)
                sums = tl.dot(values, x, sums)
    return gate_of(sums * factor[:, None], HALVES)


@triton.constexpr_function
def _scale_asm(shift):
    """Return PTX for two numbers of 4 bits as bfloat16: q + 128, then q - 8, then that times $2 plus $3."""
    # 0xEA: (a and b) or c.
    return (
        f"{{ .reg .b32 bits, one, offset; shr.u32 bits, $1, {shift};"
        "lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;"
        "mov.b32 one, 0x3F803F80; mov.b32 offset, 0xC308C308;"
        "fma.rn.bf16x2 bits, bits, one, offset; fma.rn.bf16x2 $0, bits, $2, $3; }"
    )


@triton.jit
def _values(words, PLANE: tl.constexpr, scale, low, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return a plane of words [C, n] in a dtype, with what read_pair returned.

    4 bits become bfloat16 two at a time: then scales and minimums are rounded, too.
    """
    if BITS == 4 and DTYPE.is_bf16():
        half = (words if PLANE < 4 else words >> 16).to(tl.int16)
        step = scale / 16
        # The weight of q = 8: bfloat16 holds small steps from there well.
        middle = (low + scale + 8 * step).to(DTYPE)
        return tl.inline_asm_elementwise(
            _scale_asm(PLANE % 4 * 4),
            "=r,r,r,r",
            [half, tl.broadcast_to(step.to(DTYPE), half.shape), tl.broadcast_to(middle, half.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return scaled(words, PLANE, scale, low, BITS).to(DTYPE)


@triton.jit
def _load_plane(x_at, order_at, is_row, start, SIZE: tl.constexpr):
    """Load 32 columns of rows of x, [32, ROWS], that meet a plane; beyond K and the rows they are 0."""
    k = start + tl.arange(0, 32)
    is_k = k < SIZE
    if len(order_at) > 0:
        k = tl.load(order_at[0] + k, mask=is_k, other=0)
    return tl.load(x_at + k[:, None], mask=is_k[:, None] & is_row[None, :], other=0.0)


@triton.jit
def place_pair(
    weight, expert, num_columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return pointers to a program's words [P C, 32], pairs [P C], factors [C] and order."""
    SPAN: tl.constexpr = 32 * 32 // BITS
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    words_ptr, pairs_ptr, factors_ptr, order_ptr = weight
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, PARTS * COLUMNS)
    row = tile_weight_rows(index % COLUMNS, num_columns, COLUMNS, HALVES)
    words_at = words_ptr + ((expert * num_weight_rows + row) * SPANS + index // COLUMNS)[:, None] * 32
    words_at += tl.arange(0, 32)[None, :]
    pairs_at = pairs_ptr + expert * SPANS * (SPAN // GROUP) * num_weight_rows + row
    factors_at = factors_ptr + expert * HALVES + tl.arange(0, COLUMNS) // (COLUMNS // HALVES)
    return words_at, pairs_at, factors_at, _place_order(order_ptr, expert, SIZE)


@triton.jit
def sum_pair(
    place, x_ptr, x_row, stride_x, num_columns, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the products of gate and of up with a single row of x, in each of ROWS; see grouped_gemm."""
    SPAN: tl.constexpr = 32 * 32 // BITS
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    PLANES: tl.constexpr = GROUP // 32
    GROUPS: tl.constexpr = SPAN // GROUP
    words_at, pairs_at, factors_at, order_at = place
    num_weight_rows = num_columns * HALVES
    part = tl.arange(0, PARTS)
    row_part = tl.arange(0, PARTS * COLUMNS) // COLUMNS
    x_at = x_ptr + x_row.to(tl.int64) * stride_x
    total = tl.zeros([PARTS, COLUMNS, ROWS], tl.float32)
    for span in tl.range(0, SPANS, PARTS, num_stages=STAGES):
        # Past the end the last span is read again, and meets zeros.
        past = tl.maximum(span + row_part - (SPANS - 1), 0)
        words = tl.load(words_at + (span - past)[:, None] * 32)
        for group in tl.static_range(GROUPS):
            of_group = (span + row_part - past) * GROUPS + group
            both = tl.load(pairs_at + of_group * num_weight_rows)
            scale, low = halves_of(tl.reshape(both, [PARTS, COLUMNS, 1]))
            products, sums = _sum_group(
                x_at, order_at, (span + part) * SPAN + group * GROUP, words,
                group * PLANES, PLANES, SIZE, BITS, ROWS, COLUMNS,
            )  # fmt: skip
            total += scale * products + low * sums
    return gate_of(tl.sum(total, axis=0) * tl.load(factors_at)[:, None], HALVES)


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
    x_at, order_at, k, words, FIRST: tl.constexpr, PLANES: tl.constexpr, SIZE: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums over a group of parts of K: of q x and of x, [P, C, R] float32, x in every row.

    Args:
        x_at: pointer to a row.
        order_at: see _place_order.
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
        if len(order_at) > 0:
            column = tl.load(order_at[0] + column, mask=inside, other=0)
        x = tl.load(x_at + column, mask=inside, other=0.0)
        x = tl.broadcast_to(x[:, :, None], [PARTS, 32, ROWS])
        values = tl.reshape(_raised(words, FIRST + plane, BITS, DTYPE), [PARTS, COLUMNS, 32])
        products = tl.dot(values, x, products)
        sums = tl.dot(ones, x, sums)
    return products - OFFSET * sums, sums
