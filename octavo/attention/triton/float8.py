"""Products with a float8 (e4m3) cache, read as pairs: an int16 holds the numbers of dims 2 i and 2 i + 1.

Tensor cores need two keys of one dim side by side in a register. The instruction that transposes values
on their way from shared memory moves 16 bits at a time; single bytes would be fetched one by one. So a
tile is one of pairs, that falls into a tile of its even dims and one of its odd dims, each a product:

    scores = q_even k_even + q_odd k_odd          values = w v_even | w v_odd

Products are float16 whatever the queries are: e4m3 converts to float16 exactly and in one instruction for
two numbers, to bfloat16 in four, and float16 queries and weights are finer than what they meet.

Functions that take a shape do what is usual if it is not packed; odd parts are 0 then.
"""

import triton
import triton.language as tl


@triton.jit
def product_queries(q, shape):
    """Return q [R, D] as float16 operands (even [R, D / 2], odd [R, D / 2]); beyond +-65504 they saturate."""
    if shape.packed:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
        return tl.split(tl.reshape(q, [shape.rows, shape.padded_dim // 2, 2]))
    else:
        return q, 0.0


@triton.jit
def key_products(q, q_odd, k, shape):
    """Return q k [R, keys] float32 of product_queries' operands and a tile of the cache."""
    if shape.packed:
        k_even, k_odd = unpack(k)
        return tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k_even)))
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def split_values(values, shape):
    """Return weighted values [R, D] as (even [R, D / 2], odd [R, D / 2])."""
    if shape.packed:
        return tl.split(tl.reshape(values, [shape.rows, shape.padded_dim // 2, 2]))
    else:
        return values, 0.0


@triton.jit
def add_values(values, values_odd, weights, v, shape):
    """Add weights [R, keys] times a tile of the cache to what split_values returned."""
    if shape.packed:
        v_even, v_odd = unpack(v)
        weights = weights.to(tl.float16)
        return tl.dot(weights, v_even, values), tl.dot(weights, v_odd, values_odd)
    else:
        return tl.dot(weights.to(v.dtype), v, values, input_precision="ieee"), values_odd


@triton.jit
def join_values(values, values_odd, shape):
    """Return [R, D] of what split_values split."""
    if shape.packed:
        return tl.reshape(tl.join(values, values_odd), [shape.rows, shape.padded_dim])
    else:
        return values


@triton.jit
def unpack(pairs):
    """Return the float16 numbers in the low and in the high bytes of int16 pairs of e4m3.

    A register holds two pairs. One permutation brings its low bytes together and its high ones; the
    compiler's own way of taking pairs apart costs three times as many instructions.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
