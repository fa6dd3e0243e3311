"""The GEMV's prologue: a row of x goes to shared memory, normed, and scaled for float16.

Weights that were float8 need x in float16. It is divided by the power of two of its largest number: float16
then holds it as exactly as bfloat16 down to 2^-14 of that number, and smaller numbers with an error of 2^-25
of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.floats.dense_gemv_tiling import WARPS, X_STEP

_WARPS = gl.constexpr(WARPS)
_X_STEP = gl.constexpr(X_STEP)
# The exponent's bits in a float32, and the range of powers of two whose inverse is a normal number.
_EXPONENT = gl.constexpr(0x7F800000)
_LEAST, _MOST = gl.constexpr(0x08000000), gl.constexpr(0x76000000)
_INVERSE = gl.constexpr(0x7F000000)


@gluon.jit
def load_row(numbers, STEPS: gl.constexpr, SIZE: gl.constexpr):
    """Load SIZE numbers, past them zeros: a tuple of STEPS times [X_STEP]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [_WARPS], [0])
    k = gl.arange(0, _X_STEP, LAYOUT)
    row = ()
    for step in gl.static_range(STEPS):
        at = step * _X_STEP + k
        row = row + (gl.load(numbers + at, mask=at < SIZE, other=0.0),)  # noqa: RUF005
    return row


@gluon.jit
def keep_row(row, first: gl.constexpr, xs, norms, eps, shape):
    """Write the row, normed, and for float8 weights divided by a power of two.

    Args:
        row: [any, X_STEP] in shared memory; K / X_STEP from `first` on are this row's.
        first: see row.
        xs, norms: x and its norm's weight, from load_row.
        eps, shape: see float_gemv_kernel.

    Returns:
        The factor that turns products with the stored row into results.
    """
    STEPS: gl.constexpr = len(xs)
    LAYOUT: gl.constexpr = xs[0].type.layout
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
    if shape.norm and shape.height > 0:
        total, top = gl.reduce((squares, largest), 0, add_and_max)
    else:
        total, top = gl.sum(squares, 0), gl.max(largest, 0)
    if shape.norm:
        before = gl.rsqrt(total / shape.size + eps)
    if shape.height > 0:
        power = top.to(gl.int32, bitcast=True) & _EXPONENT
        power = gl.minimum(gl.maximum(power, _LEAST), _MOST)
        after = before * power.to(gl.float32, bitcast=True)
        before = (_INVERSE - power).to(gl.float32, bitcast=True)
    for step in gl.static_range(STEPS):
        x = xs[step].to(gl.float32)
        if shape.norm:
            x *= norms[step].to(gl.float32)
        row.index(first + step).store((x * before).to(row.dtype))
    return after


@gluon.jit
def add_and_max(sum_a, top_a, sum_b, top_b):
    """Combine sums and maxima; reducing both together synchronises the warps only once."""
    return sum_a + sum_b, gl.maximum(top_a, top_b)
