"""What the GEMV multiplies, beside weights: x, normed in shared memory, and the scales of float8 weights.

Weights that were float8 need x in float16. It is divided by the power of two of its largest number: float16
then holds it as exactly as bfloat16 down to 2^-14 of that number, and smaller numbers with an error of 2^-25
of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.floats.dense_gemv_tiling import WARPS, X_STEP
from octavo.gemm.hopper.gemv_tiles import ceil_div

_WARPS = gl.constexpr(WARPS)
_X_STEP = gl.constexpr(X_STEP)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8]))
"""Layout of a tile's products, [W, rows, 8]."""
# The exponent's bits in a float32, and the range of powers of two whose inverse is a normal number.
_EXPONENT = gl.constexpr(0x7F800000)
_LEAST, _MOST = gl.constexpr(0x08000000), gl.constexpr(0x76000000)
_INVERSE = gl.constexpr(0x7F000000)


@gluon.jit
def load_row(numbers, STEPS: gl.constexpr, SIZE: gl.constexpr):
    """Load SIZE numbers, then zeros: a tuple of STEPS times [X_STEP]."""
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


@gluon.jit
def load_row_scales(operands, column, num_columns, shape):
    """Return the scales of a dense weight's rows, of gate and of up; 1.0 if its rows have none."""
    scales = (1.0, 1.0)
    if shape.experts == 0 and shape.height > 0 and shape.width >= shape.size:
        column = gl.minimum(column, num_columns - 1)
        gate = gl.load(operands.scales + column // shape.height)
        scales = (gate, gate)
        if shape.halves == 2:
            scales = (gate, gl.load(operands.scales + (num_columns + column) // shape.height))
    return scales


@gluon.jit
def load_factor(operands, pair, row, num_columns, shape):
    """Load the factor of all products of an expert, a number or [1, rows, 1]."""
    factor = 1.0
    if shape.experts > 0:
        if shape.activation is None:
            factor = gl.load(operands.factors + pair)
        if shape.height > 0 and shape.width >= shape.size:
            factor *= gl.load(first_scales(operands, pair, row, num_columns, shape))
    return factor


@gluon.jit
def first_scales(operands, pair, row, num_columns, shape):
    """Return pointers to the first scale of each row; to any expert's if the pair's is not held here."""
    PARTS: gl.constexpr = ceil_div(shape.size, shape.width)
    if shape.experts > 0:
        expert = gl.minimum(gl.load(operands.ids + pair), shape.experts - 1)
        return operands.scales + expert * (PARTS * shape.halves) * num_columns + row
    else:
        return operands.scales + row // shape.height * PARTS


@gluon.jit
def load_ratios(scales_at, first, COUNT: gl.constexpr, num_columns, ATOM: gl.constexpr, shape):
    """Load the scales of COUNT atoms of each warp from block `first` on: a tuple of [W, rows, 1]."""
    PARTS: gl.constexpr = ceil_div(shape.size, shape.width)
    warp = gl.arange(0, _WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
    ratios = ()
    for block in gl.static_range(COUNT):
        part = gl.minimum(((first + block) * _WARPS + warp) * ATOM // shape.width, PARTS - 1)
        if shape.experts > 0:
            part *= shape.halves * num_columns
        ratios = ratios + (gl.load(scales_at + part),)  # noqa: RUF005
    return ratios
