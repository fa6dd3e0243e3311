"""The row of x that gemv_linear multiplies: normed, and scaled for float16, in shared memory.

Weights that were float8 need x in float16. It is divided by the power of two of its largest number: so
float16 holds it as exactly as bfloat16 down to 2^-14 of that number, and smaller numbers with an error of
2^-25 of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.layers.linear.gemv.tiling import WARPS, X_STEP

_WARPS = gl.constexpr(WARPS)
_X_STEP = gl.constexpr(X_STEP)
# Bits of a float32's exponent: its largest value but for infinity leaves room for the power's inverse.
_EXPONENT = gl.constexpr(0x7F800000)
_LEAST, _MOST = gl.constexpr(0x08000000), gl.constexpr(0x76000000)
_INVERSE = gl.constexpr(0x7F000000)


@gluon.jit
def keep_row(row, operands, eps, shape):
    """Write the row, normed, and for float8 weights divided by a power of two; past K zeros.

    Args:
        row: [K / X_STEP, X_STEP] in shared memory.
        operands, eps, shape: see kernel.

    Returns:
        What the results are to be multiplied by.
    """
    STEPS: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [_WARPS], [0])
    k = gl.arange(0, _X_STEP, LAYOUT)
    xs = ()
    norms = ()
    # All loads are on their way before the first one is used.
    for step in gl.static_range(STEPS):
        at = step * _X_STEP + k
        xs = xs + (gl.load(operands.x + at, mask=at < shape.size, other=0.0),)  # noqa: RUF005
        if shape.norm:
            norms = norms + (gl.load(operands.norm + at, mask=at < shape.size, other=0.0),)  # noqa: RUF005
    squares = gl.zeros([_X_STEP], gl.float32, LAYOUT)
    largest = squares
    for step in gl.static_range(STEPS):
        x = xs[step].to(gl.float32)
        squares += x * x
        if shape.norm:
            x *= norms[step].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(x))
    before = 1.0
    after = 1.0
    if shape.norm:
        before = gl.rsqrt(gl.sum(squares, 0) / shape.size + eps)
    if shape.height > 0:
        power = gl.max(largest, 0).to(gl.int32, bitcast=True) & _EXPONENT
        power = gl.minimum(gl.maximum(power, _LEAST), _MOST)
        after = before * power.to(gl.float32, bitcast=True)
        before = (_INVERSE - power).to(gl.float32, bitcast=True)
    for step in gl.static_range(STEPS):
        x = xs[step].to(gl.float32)
        if shape.norm:
            x *= norms[step].to(gl.float32)
        row.index(step).store((x * before).to(row.dtype))
    return after
