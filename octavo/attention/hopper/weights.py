"""The weights of a tile of keys, between its softmax and their product with the values.

They wait there while the next tile's scores are computed, two numbers in each register. As a tensor of 16-bit
numbers they would be taken apart and put together again at both ends of the loop: 64 instructions a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pack(weights, DTYPE: gl.constexpr):
    """Round weights [R, K] float32 to a 16-bit dtype; returns pairs [R, K / 2] int32."""
    even, odd = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return packed weights as the left operand [R, K] of a product with results in LAYOUT."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even.to(DTYPE, bitcast=True), odd.to(DTYPE, bitcast=True))
    weights = gl.reshape(both, [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, LAYOUT, 2))
