"""Products with a float8 (e4m3) cache, read as pairs: an int16 holds the numbers of dims 2 i and 2 i + 1.

Tensor cores need two keys of the same dim in one register. The instruction that transposes a tile when it
loads it from shared memory moves 16 bits at a time; for bytes there is none. So a tile of pairs is loaded,
and split into a tile of even dims and one of odd dims, with a product each:

    scores = q_even k_even + q_odd k_odd          values = w v_even | w v_odd

Products are float16, whatever the dtype of the queries: one instruction converts two e4m3 numbers to float16
exactly, while bfloat16 takes four. float16 is more precise than e4m3, so queries and weights lose little.

If the shape is not packed, the functions use the whole tile, and odd parts are 0.
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
    """Return weighted values [R, D] as (even [R, D / 2], odd [R, D / 2]); D is that of values."""
    if shape.packed:
        return tl.split(tl.reshape(values, [shape.rows, shape.padded_value_dim // 2, 2]))
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
        return tl.reshape(tl.join(values, values_odd), [shape.rows, shape.padded_value_dim])
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
