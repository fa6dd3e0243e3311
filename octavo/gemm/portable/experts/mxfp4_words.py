"""Numbers of MXFP4 as floats, in kernels; imported only where Triton runs.

    a number's bits     s e e m
    bfloat16            s 000000ee m000000      the number times 2 ** -126, subnormals included

A shift and a mask make two numbers of a block of each word, and a product with a power of two makes them
exact: no table is read. Numbers stay in the thread that has their word, in the order in which tensor cores
take a left operand; see mxfp4_weight.pack_words.
"""

import triton
import triton.language as tl

SPAN = tl.constexpr(128)
"""Columns of 16 words: four blocks."""


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
