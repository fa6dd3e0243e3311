"""Tiles of experts in MXFP4 as operands of the grouped GEMM; imported only where Triton runs.

    a number's bits     s e e m
    bfloat16            s 000000ee m000000      the number times 2 ** -126, subnormals included

A shift and a mask make two numbers of a block of each word, and a product with a power of two makes them
exact: no table is read. Numbers stay in the thread that has their word, in the order in which tensor cores
take a left operand; see forms.mxfp4_experts.pack_words.
"""

import triton
import triton.language as tl

from octavo.gemm.portable.experts.expert_tile import gate_of, tile_weight_rows

SPAN = tl.constexpr(128)
"""Columns of 16 words: four blocks."""


@triton.jit
def place_mxfp4(
    weight, expert, num_columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return pointers to a program's words and exponents of each part of K: [P C, 16] and [P C]."""
    words_ptr, exponents_ptr = weight
    index = tl.arange(0, PARTS * COLUMNS)
    num_weight_rows = num_columns * HALVES
    # The expert's offset alone needs 64 bits.
    first_row = expert * ((SIZE + SPAN - 1) // SPAN) * num_weight_rows
    row = tile_weight_rows(index % COLUMNS, num_columns, COLUMNS, HALVES) + index // COLUMNS * num_weight_rows
    words_at = words_ptr + first_row * 16 + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    return words_at, exponents_ptr + first_row + row


@triton.jit
def sum_mxfp4(
    place, x_ptr, x_row, is_row, stride_x, num_columns, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products of gate and of up [COLUMNS / HALVES, ROWS]; see grouped_gemm."""
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    words_at, exponents_at = place
    num_weight_rows = num_columns * HALVES
    part = tl.arange(0, PARTS * COLUMNS) // COLUMNS
    k = (tl.arange(0, PARTS * ROWS) // ROWS * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    x_at = x_ptr + x_row[:, None] * stride_x + k
    total = tl.zeros([COLUMNS, ROWS] if PARTS == 1 else [PARTS, COLUMNS, ROWS], tl.float32)
    for span in tl.range(0, SPANS, PARTS, num_stages=STAGES):
        words = _load_span(words_at + span * num_weight_rows * 16, span, part[:, None], SPANS, PARTS)
        exponents = _load_span(exponents_at + span * num_weight_rows, span, part, SPANS, PARTS)
        inside = is_row[:, None] & (span * SPAN + k < SIZE)
        x = tl.load(x_at + span * SPAN, mask=inside, other=0.0)
        total = _add_product(total, unpacked(words, exponents, x.dtype), x, PARTS, COLUMNS)
    if PARTS > 1:
        total = tl.sum(total, axis=0)
    return gate_of(total, HALVES)


@triton.jit
def _load_span(at, first, part, SPANS: tl.constexpr, PARTS: tl.constexpr):
    """Load what parts of K have from a span on; beyond the last one it is 0."""
    if SPANS % PARTS == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=first + part < SPANS, other=0)


@triton.jit
def _add_product(total, weight, x, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the products of parts of K, weight [P C, SPAN] and x [P R, SPAN], to [C, R], or to [P, C, R]."""
    if PARTS == 1:
        return tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        weight = tl.reshape(weight, [PARTS, COLUMNS, SPAN])
        x = tl.permute(tl.reshape(x, [PARTS, x.shape[0] // PARTS, SPAN]), (0, 2, 1))
        return tl.dot(weight, x, total, input_precision="ieee")


@triton.jit
def _bits(words, BLOCK: tl.constexpr):
    """Return two bfloat16 numbers of a block from each word, uint32; they are 2 ** -126 too small."""
    if BLOCK == 0:
        return words & 0x81C081C0
    elif BLOCK == 1:
        return (words >> 6 | words << 26) & 0x81C081C0
    elif BLOCK == 2:
        return words << 4 & 0x81C081C0
    else:
        return (words >> 2 | words << 30) & 0x81808180 | words << 6 & 0x00400040


@triton.jit
def _numbers(words, exponents, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Return a block's numbers [C, 32] of words [C, 16] and exponents [C], both uint32."""
    bits = _bits(words, BLOCK)
    if DTYPE.is_bf16():
        scale = (exponents << 7 if BLOCK == 0 else exponents >> 8 * BLOCK - 7) & 0x7F80
        scale = tl.broadcast_to(scale.to(tl.uint16)[:, None], bits.shape)
        # Two numbers by one instruction, which compilers make of two products only with two others.
        bits = tl.inline_asm_elementwise(
            """{ .reg .b32 both, zero;
            mov.b32 both, {$2, $2}; mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, both, zero; }""",
            "=r,r,h",
            [bits, scale],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        low = bits.to(tl.uint16).to(DTYPE, bitcast=True)
        high = (bits >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        scale = ((exponents >> 8 * BLOCK & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
        low = ((bits << 16).to(tl.float32, bitcast=True) * scale).to(DTYPE)
        high = ((bits & 0xFFFF0000).to(tl.float32, bitcast=True) * scale).to(DTYPE)
    return tl.reshape(tl.join(low, high), [bits.shape[0], 2 * bits.shape[1]])


@triton.jit
def unpacked(words, exponents, DTYPE: tl.constexpr):
    """Return the numbers [C, 128] of words [C, 16] and exponents [C]."""
    words, exponents = words.to(tl.uint32, bitcast=True), exponents.to(tl.uint32, bitcast=True)
    even = tl.join(_numbers(words, exponents, 0, DTYPE), _numbers(words, exponents, 2, DTYPE))
    odd = tl.join(_numbers(words, exponents, 1, DTYPE), _numbers(words, exponents, 3, DTYPE))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [words.shape[0], SPAN])
