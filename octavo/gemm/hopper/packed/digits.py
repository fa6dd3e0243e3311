"""The arithmetic of the packed GEMV: a row of x as digits, and its exact products with packed weights.

The row is normed, and stored in shared memory as four signed digits of base 256. All of its numbers are
multiplied by a power of two, so that the largest one is below 2^30, and lose their fraction: an error of
2^-29 of the largest number.

    span        256 columns: those of 32 words of the weight
    byte p      of the word with digits that meet word j: column 64 p + 32 h + j of the span
    row         spans of all warps | h | first or second 16 words | warp | digit | word | byte

So a tensor core's operand lies in one piece: 64 bytes of each digit, four by four those that one word meets.

Tensor cores multiply bytes of words with digits, exactly:

    word & 0x0F0F0F0F           byte p: column 64 p + j of the span, for word j
    (word >> 4) & 0x0F0F0F0F    byte p: column 64 p + 32 + j

A span has two groups: bytes 0 and 1 of each word, and bytes 2 and 3. An operand of tensor cores has 8
columns: the four digits of the first group, with zeros for the second one, and those of the second, with
zeros for the first. So one product gives the sums of both groups, for each digit. They become floats and are
scaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.floats.gemv_operands import add_and_max
from octavo.gemm.hopper.gemv_tiles import ceil_div
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, SPANS_AT_ONCE, WARPS
from octavo.kernels.ring import free_stage, wait_for_stage

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_SPAN = gl.constexpr(SPAN)
_SPANS = gl.constexpr(SPANS_AT_ONCE)
_DIGITS = gl.constexpr(4)
# The exponent's bits in a float32; the row is scaled so that its largest number is below 2^30.
_EXPONENT = gl.constexpr(0x7F800000)
_LEAST, _MOST = gl.constexpr(0x10000000), gl.constexpr(0x7F000000)
# For a power of two p, the bits of 1 / p are _INVERSE less those of p; _BITS more multiply it by 2^29.
_INVERSE = gl.constexpr(0x7F000000)
_BITS = gl.constexpr(29 << 23)

# Layouts of a step of the row, [SPANS_AT_ONCE, bytes of a word, 64]: as it is loaded, and with each thread's
# four bytes of a word first.
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
# An integer's bytes become its signed digits of base 256: a digit of 128 or more is lowered by 256, and
# carries 1 into the next one.
_SIGNED = "add.s32 i, {0}, 0x00808080; xor.b32 {1}, i, 0x00808080;"
# Four integers become four words, each of which has one digit of all four.
_TO_DIGITS = gl.constexpr(
    "{ .reg .b32 i, a, b, c, d, low, high;"
    + "".join(_SIGNED.format(f"${4 + index}", name) for index, name in enumerate("abcd"))
    + """
    prmt.b32 low, a, b, 0x5140; prmt.b32 high, c, d, 0x5140;
    prmt.b32 $0, low, high, 0x5410; prmt.b32 $1, low, high, 0x7632;
    prmt.b32 low, a, b, 0x7362; prmt.b32 high, c, d, 0x7362;
    prmt.b32 $2, low, high, 0x5410; prmt.b32 $3, low, high, 0x7632; }"""
)

# Layout of a product, [W, rows, 8].
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8]))
# Layout of sums, [W, rows, halves of a span, digits], as tensor cores leave [W, rows, 8].
_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 8, 0, 0]],
        [[0, 0, 0, 2], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [WARPS, TILE_ROWS, 2, 4],
    )
)
# Layout of digits, [W, halves, digits, 64 bytes], as tensor cores want [W, 64 bytes, 8].
_DIGITS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        [[0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [WARPS, 2, 4, 64],
    )
)
# Layouts of the pairs of a tile and of half of it, [W, halves of a span, rows].
_PAIRS_LANES = [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
_PAIRS_WARPS = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 0, 8]], _PAIRS_LANES, _PAIRS_WARPS, [], [WARPS, 2, TILE_ROWS])
)
_HALF_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout([], _PAIRS_LANES, _PAIRS_WARPS, [], [WARPS, 2, TILE_ROWS // 2])
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
def load_row(numbers, STEPS: gl.constexpr, SIZE: gl.constexpr):
    """Load SIZE numbers, then zeros: a tuple of STEPS times [SPANS_AT_ONCE, bytes of a word, 64]."""
    column = columns_of_spans()
    row = ()
    for step in gl.static_range(STEPS):
        at = step * (_SPANS * _SPAN) + first_columns()[:, None, None] + column
        row = row + (gl.load(numbers + at, mask=at < SIZE, other=0.0),)  # noqa: RUF005
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
        totals: [steps, SPANS_AT_ONCE, 2] float32 in shared memory, the sums of groups.
        xs, norms: x and its norm's weight, from load_row.
        eps, shape: see packed_gemv_kernel.

    Returns:
        The factor that turns sums of digits' products into results.
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
        # A word's first group is bytes 0 and 1, its second one bytes 2 and 3.
        total = gl.sum(gl.sum(x, 2).reshape([_SPANS, 2, 2]), 2)
        totals.index(step).store(total * before)
        words = gl.convert_layout((x * to_integer).to(gl.int32), _ROW, assert_trivial=True)
        words = gl.inline_asm_elementwise(
            _TO_DIGITS, "=r,=r,=r,=r,r,r,r,r", [words], dtype=gl.int32, is_pure=True, pack=4
        )
        words = words.reshape([_SPANS // _WARPS, _WARPS, _DIGITS, 4, 16])
        row.index(step).store(words.permute([0, 3, 1, 2, 4]))
    return before * (power - _BITS).to(gl.float32, bitcast=True)


@gluon.jit
def half_mask():
    """Return bytes [W, halves of a span, digits, 64]: -1 where a word's byte belongs to the half, else 0."""
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, _DIGITS_LAYOUT))))
    byte = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, _DIGITS_LAYOUT))))
    keeps = (byte // 2 % 2)[None, None, None, :] == half[None, :, None, None]
    return gl.where(keeps, -1, 0).to(gl.int8).broadcast_to([_WARPS, 2, _DIGITS, 64])


@gluon.jit
def multiply_tile(pipe, row, totals, mask, after, tile, shape):
    """Return each warp's products of a tile, [W, rows] float32.

    Args:
        pipe, shape: see packed_gemv_kernel.
        row, totals: see keep_digits.
        mask: see half_mask.
        after: factor of sums of digits.
        tile: the program's tile.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, _PRODUCT, 16)
    ATOMS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=3)
    PLANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    TOTALS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LOWS: gl.constexpr = gl.SliceLayout(3, _SUMS)
    STEPS: gl.constexpr = ceil_div(shape.summed * shape.padded, shape.blocks * _WARPS * _SPAN)
    PLACES: gl.constexpr = row.shape[0] * row.shape[1]
    planes = row._reinterpret(gl.int8, [4 * PLACES, _WARPS, _DIGITS, 64], PLANES)
    totals = totals._reinterpret(gl.float32, [PLACES, _WARPS, 2], TOTALS)
    sums = gl.zeros([_WARPS, _ROWS, 2, _DIGITS], gl.float32, _SUMS)
    lows = gl.zeros([_WARPS, _ROWS, 2], gl.float32, LOWS)
    for turn in range(STEPS):
        stage = wait_for_stage(pipe.ring, tile * STEPS + turn, shape.stages)
        atoms = pipe.words.index(stage)._reinterpret(gl.int8, [2 * shape.blocks, _WARPS, _ROWS, 64], ATOMS)
        words = ()
        pairs = ()
        for block in gl.static_range(shape.blocks):
            both = (atoms.index(block).load(A), atoms.index(shape.blocks + block).load(A))
            words = words + (both,)  # noqa: RUF005
            pairs = pairs + (_load_pairs(pipe.pairs, stage, block, shape),)  # noqa: RUF005
        free_stage(pipe.ring, stage)
        for block in gl.static_range(shape.blocks):
            at = turn * shape.blocks + block
            products = gl.zeros([_WARPS, _ROWS, 8], gl.int32, _PRODUCT)
            for atom in gl.static_range(2):
                low, high = _to_bytes(words[block][atom])
                products = mma_v2(low, _load_digits(planes.index(4 * at + atom), mask), products)
                products = mma_v2(high, _load_digits(planes.index(4 * at + 2 + atom), mask), products)
            products = products.reshape([_WARPS, _ROWS, 2, _DIGITS])
            products = gl.convert_layout(products, _SUMS, assert_trivial=True)
            scale = (pairs[block] & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            least = (pairs[block] >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            sums += products.to(gl.float32) * gl.expand_dims(scale, 3)
            lows += least * gl.expand_dims(totals.index(at).load(gl.SliceLayout(1, LOWS)), 1)
    digit = gl.arange(0, _DIGITS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, _SUMS))))
    worth = ((127 + 8 * digit) << 23).to(gl.float32, bitcast=True)
    return gl.sum(gl.sum(sums * worth[None, None, None, :], 3) * after + lows, 2)


@gluon.jit
def _to_bytes(words):
    """Return the even and the odd planes of words, as bytes."""
    low = gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [words], dtype=gl.int8, is_pure=True, pack=4
    )
    high = gl.inline_asm_elementwise(
        "{ .reg .b32 moved; shr.u32 moved, $1, 4; and.b32 $0, moved, 0x0F0F0F0F; }",
        "=r,r", [words], dtype=gl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    return low, high


@gluon.jit
def _load_digits(plane, mask):
    """Return 64 bytes of each column, [W, 64, 8], zeros for those of the other half of a span.

    Args:
        plane: [W, digits, 64] int8 in shared memory.
        mask: see half_mask.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, _PRODUCT, 16)
    bytes_ = plane.load(gl.SliceLayout(1, _DIGITS_LAYOUT))
    bytes_ = gl.expand_dims(bytes_, 1).broadcast_to([_WARPS, 2, _DIGITS, 64])
    bytes_ = gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [bytes_, mask], dtype=gl.int8, is_pure=True, pack=4
    )
    return gl.convert_layout(
        bytes_.reshape([_WARPS, 2 * _DIGITS, 64]).permute([0, 2, 1]), B, assert_trivial=True
    )


@gluon.jit
def _load_pairs(pairs, stage, block: gl.constexpr, shape):
    """Return pairs of a scale and a minimum of each warp's span, [W, rows, halves of a span] int32.

    Args:
        pairs: [stages * halves of a tile, groups of a step, 1, rows of a half] int32 in shared memory.
        stage: the stage to read.
        block: the warp's span.
        shape: see packed_gemv_kernel.Shape.
    """
    if shape.halves == 1:
        found = _load_half(pairs.index(stage), block, shape, _PAIRS)
    else:
        gate = _load_half(pairs.index(2 * stage), block, shape, _HALF_PAIRS)
        up = _load_half(pairs.index(2 * stage + 1), block, shape, _HALF_PAIRS)
        found = gl.join(gate, up).permute([0, 1, 3, 2]).reshape([_WARPS, 2, _ROWS])
    return gl.convert_layout(found.permute([0, 2, 1]), gl.SliceLayout(3, _SUMS), assert_trivial=True)


@gluon.jit
def _load_half(pairs, block: gl.constexpr, shape, LAYOUT: gl.constexpr):
    """Return pairs of one half of a tile, [W, halves of a span, rows of the half] int32."""
    OWN: gl.constexpr = _ROWS // shape.halves
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=4 * OWN, element_bitwidth=32, rank=3)
    return pairs._reinterpret(gl.int32, [shape.blocks, _WARPS, 2, OWN], SHARED).index(block).load(LAYOUT)
