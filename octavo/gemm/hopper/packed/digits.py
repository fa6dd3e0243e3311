"""The row of x that the packed GEMV multiplies: normed, as four signed digits of base 256, in shared memory.

All numbers of the row are multiplied by a power of two, so that the largest one is below 2^30, and lose what
then lies behind the point: an error of 2^-29 of the largest number.

    span        256 columns: those of 32 words of the weight
    byte p      of the word with digits that meet word j: column 64 p + 32 h + j of the span
    row         spans of all warps | h | first or second 16 words | warp | digit | word | byte

So a tensor core's operand lies in one piece: 64 bytes of each digit, four by four those that one word meets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.floats.gemv_prologue import add_and_max
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS

_WARPS = gl.constexpr(WARPS)
_SPAN = gl.constexpr(SPAN)
_SPANS = gl.constexpr(SPANS_AT_ONCE)
_DIGITS = gl.constexpr(4)
# Bits of a float32's exponent; the row is scaled so that its largest number is below 2^30.
_EXPONENT = gl.constexpr(0x7F800000)
_LEAST, _MOST = gl.constexpr(0x10000000), gl.constexpr(0x7F000000)
# Bits of 1 / p are _INVERSE less those of a power of two p; _BITS more make it 2^29 times as much.
_INVERSE = gl.constexpr(0x7F000000)
_BITS = gl.constexpr(29 << 23)

# Of a step of the row, [SPANS_AT_ONCE, bytes of a word, 64], as it is loaded; and then with a thread's four
# bytes of a word first.
_BLOCKED = gl.constexpr(gl.BlockedLayout([1, 4, 4], [2, 1, 16], [WARPS, 1, 1], [2, 1, 0]))
_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2]],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [1, 0, 0]],
        [[2, 0, 0], [4, 0, 0], [8, 0, 0]],
        [],
        [SPANS_AT_ONCE, 4, 64],
    )
)
# Bytes of an integer that are its signed digits, of base 256: each lower one that is 128 or more is 256 less,
# and the next one 1 more.
_SIGNED = "add.s32 i, {0}, 0x00808080; xor.b32 {1}, i, 0x00808080;"
# Four integers to four words, each with one digit of all four.
_TO_DIGITS = gl.constexpr(
    "{ .reg .b32 i, a, b, c, d, low, high;"
    + "".join(_SIGNED.format(f"${4 + index}", name) for index, name in enumerate("abcd"))
    + """
    prmt.b32 low, a, b, 0x5140; prmt.b32 high, c, d, 0x5140;
    prmt.b32 $0, low, high, 0x5410; prmt.b32 $1, low, high, 0x7632;
    prmt.b32 low, a, b, 0x7362; prmt.b32 high, c, d, 0x7362;
    prmt.b32 $2, low, high, 0x5410; prmt.b32 $3, low, high, 0x7632; }"""
)


@gluon.jit
def allocate_row(STEPS: gl.constexpr):
    """Return shared memory for a row and for its sums; see keep_digits."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    row = gl.allocate_shared_memory(gl.int32, [STEPS, _SPANS // _WARPS, 4, _WARPS, _DIGITS, 16], WORDS)
    return row, gl.allocate_shared_memory(
        gl.float32, [STEPS, _SPANS, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )


@gluon.jit
def load_row(numbers, STEPS: gl.constexpr, shape):
    """Load K numbers, past them zeros: a tuple of STEPS times [SPANS_AT_ONCE, bytes of a word, 64]."""
    column = columns_of_spans()
    row = ()
    for step in gl.static_range(STEPS):
        at = step * (_SPANS * _SPAN) + first_columns()[:, None, None] + column
        row = row + (gl.load(numbers + at, mask=at < shape.size, other=0.0),)  # noqa: RUF005
    return row


@gluon.jit
def first_columns():
    """Return the first column of each span that is converted at once, [SPANS_AT_ONCE]."""
    return gl.arange(0, _SPANS, gl.SliceLayout(1, gl.SliceLayout(2, _BLOCKED))) * _SPAN


@gluon.jit
def columns_of_spans():
    """Return a span's columns, [1, bytes of a word, 64]."""
    byte = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, _BLOCKED)))
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, _BLOCKED)))
    return byte[None, :, None] * 64 + column[None, None, :]


@gluon.jit
def keep_digits(row, totals, xs, norms, eps, shape):
    """Write the digits of the row, normed, and its sums.

    Args:
        row: [steps, SPANS_AT_ONCE / W, 4, W, digits, 16] int32 in shared memory.
        totals: [steps, SPANS_AT_ONCE, 2] float32 in shared memory, sums of groups.
        xs, norms: x and its norm's weight, from load_row.
        eps, shape: see kernel.

    Returns:
        What sums of digits' products are to be multiplied by.
    """
    STEPS: gl.constexpr = row.shape[0]
    LAYOUT: gl.constexpr = xs[0].type.layout
    squares = gl.zeros([_SPANS, 4, 64], gl.float32, LAYOUT)
    largest = squares
    numbers = ()
    for step in gl.static_range(STEPS):
        number = xs[step]
        if shape.norm:
            x = xs[step].to(gl.float32)
            squares += x * x
            number = x * norms[step].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(number.to(gl.float32)))
        numbers = numbers + (number,)  # noqa: RUF005
    before = 1.0
    top = largest.reshape([_SPANS * _SPAN])
    if shape.norm:
        total, top = gl.reduce((squares.reshape([_SPANS * _SPAN]), top), 0, add_and_max)
        before = gl.rsqrt(total / shape.size + eps)
    else:
        top = gl.max(top, 0)
    power = top.to(gl.int32, bitcast=True) & _EXPONENT
    power = gl.minimum(gl.maximum(power, _LEAST), _MOST)
    to_integer = (_INVERSE - power + _BITS).to(gl.float32, bitcast=True)
    for step in gl.static_range(STEPS):
        x = numbers[step].to(gl.float32)
        # Groups: bytes 0 and 1, and bytes 2 and 3.
        total = gl.sum(gl.sum(x, 2).reshape([_SPANS, 2, 2]), 2)
        totals.index(step).store(total * before)
        words = gl.convert_layout((x * to_integer).to(gl.int32), _ROW, assert_trivial=True)
        words = gl.inline_asm_elementwise(
            _TO_DIGITS, "=r,=r,=r,=r,r,r,r,r", [words], dtype=gl.int32, is_pure=True, pack=4
        )
        words = words.reshape([_SPANS // _WARPS, _WARPS, _DIGITS, 4, 16])
        row.index(step).store(words.permute([0, 3, 1, 2, 4]))
    return before * (power - _BITS).to(gl.float32, bitcast=True)
