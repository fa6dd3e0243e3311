"""Numbers of MXFP4 as floats, in kernels; imported only where Triton runs.

    a byte      s e e m  s e e m       two numbers, 16 columns apart; see weight.Mxfp4ExpertWeight
    a float32   s 000000ee m000...     bits moved to their places: the number, times 2 ** -126

So one logic instruction and two shifts make a float of four bits, and no table is read.
"""

import triton
import triton.language as tl

BYTES = tl.constexpr(16)
"""Bytes of a block of 32 numbers."""
_SHIFT = tl.constexpr(63)
FACTOR = tl.constexpr(2.0**63)
"""Half of what makes up for 2 ** -126. Scales are the other half, and all of them are normal floats."""


@triton.jit
def low_numbers(values):
    """Return the numbers in the low bits of bytes, given as int32; float32, times 2 ** -126."""
    return ((values & 8) << 28 | (values & 7) << 22).to(tl.float32, bitcast=True)


@triton.jit
def high_numbers(values):
    """Return the numbers in the high bits of bytes, given as int32; float32, times 2 ** -126."""
    return ((values & 0x80) << 24 | (values & 0x70) << 18).to(tl.float32, bitcast=True)


@triton.jit
def block_scales(exponents):
    """Return the scales of numbers times 2 ** -126 times FACTOR; infinity where that is too large."""
    return (tl.minimum(exponents.to(tl.int32) + _SHIFT, 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def first_columns(byte):
    """Return the column of a row that the low bits of a byte of it belong to."""
    return byte // BYTES * (2 * BYTES) + byte % BYTES
