"""Numbers of MXFP4 as floats, in kernels; imported only where Triton runs.

    a number     s e e m
    bfloat16     s 000000ee m000000      the number times 2 ** -126, subnormals included

A unit of 16 bits holds four numbers, in planes 0 to 3; see weight.pack_units. All but those of plane 3 have
their bits at the distances that a float has them: a shift and a mask make a float, and no table is read.
"""

import triton
import triton.language as tl

UNITS = tl.constexpr(8)
"""Units of a block: those of a plane are neighbouring columns."""


@triton.jit
def numbers(units, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of a plane of units, int16, times 2 ** -126, or 2 ** -14 in float16."""
    UP: tl.constexpr = DTYPE.primitive_bitwidth - 16
    IS_HALF: tl.constexpr = DTYPE.is_fp16()
    word = units.to(tl.uint16, bitcast=True)
    if UP == 16:
        word = word.to(tl.uint32) << 16
    if PLANE < 3:
        bits = (word << 3 * PLANE) & (0x81C0 << UP)
    else:
        bits = (word << 1) & (0x8000 << UP) | (word >> 5) & (0x0100 << UP) | (word >> 4) & (0x00C0 << UP)
    if IS_HALF:
        bits = (bits & 0x8000) | (bits & 0x01C0) << 3
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def first_columns(unit):
    """Return the columns of units' numbers in plane 0; those of the next plane are UNITS later."""
    return unit // UNITS * (4 * UNITS) + unit % UNITS


@triton.jit
def powers(exponents, SHIFT: tl.constexpr):
    """Return 2 ** (exponent - 127 + SHIFT) in float32; infinity where that is too large."""
    return (tl.minimum(exponents.to(tl.int32) + SHIFT, 255) << 23).to(tl.float32, bitcast=True)
