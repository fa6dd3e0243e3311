"""Operands and epilogue of the MXFP4 GEMV: weights as TMA copied them, rows of x as kept here.

    numbers of MXFP4    become bfloat16 that are 2 ** -126 as large, by shifts and a mask (unpack_operands)
    rows of x           are 2 ** 64 as large, so that products of such numbers are ordinary floats
    a block of 32       is one product of tensor cores, and then multiplied by its power of two

Each thread reads 16 bytes of words, four neighbours, as a left operand of `mma`. Hence it reads eight
neighbours of x, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.gemm.hopper.gemv_tiles import ceil_div
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import COLUMNS, SPAN, WARPS
from octavo.gemm.hopper.unpack_operands import MXFP4_BITS
from octavo.kernels.activation import gate_and_up

_WARPS = gl.constexpr(WARPS)
_COLUMNS = gl.constexpr(COLUMNS)
_ROWS = gl.constexpr(2 * COLUMNS)
_SPAN = gl.constexpr(SPAN)
_BLOCK = gl.constexpr(SPAN // 4)
BLOCKS = gl.constexpr(4)
"""Blocks of a span."""
_LARGER = gl.constexpr(2.0**64)
SMALLER = gl.constexpr(2.0**-64)
"""The factor that undoes the scaling of rows of x."""

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8]))
"""Layout of a product, [W, rows, 8]."""
# Layout of an expert's words as units of 16 bits, [W, 8, 32], as tensor cores want rows of a left operand.
_HALF = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [WARPS, COLUMNS, SPAN // 4],
    )
)
# Layout of an expert's exponents, [W, 8].
_EXPONENTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [WARPS, COLUMNS],
    )
)
# Layout of x, [W, halves, 4, 32], as tensor cores want [W, 32, 8].
_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [WARPS, 2, 4, SPAN // 4],
    )
)
# PTX that takes a block's two bfloat16 numbers out of each word.
_NUMBERS = gl.constexpr(
    tuple(f"{{ .reg .b32 bits, more; {statements} mov.b32 $0, bits; }}" for statements in MXFP4_BITS)
)


@gluon.jit
def keep_rows(row, x, shape):
    """Write rows of x, 2 ** 64 as large, as products read them.

    Args:
        row: [parts * steps, blocks, W, halves, 32] bfloat16 in shared memory.
        x: [1 or k, K].
        shape: see there.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 2, 4, 4], [2, 4, 1, 1], [3, 2, 1, 0])
    STEPS: gl.constexpr = ceil_div(shape.size, _WARPS * _SPAN)
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    span = gl.arange(0, _WARPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    column = gl.arange(0, _BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    half, span = half[:, None, None, None], span[None, :, None, None]
    k = span * _SPAN + block[None, None, :, None] * _BLOCK + column[None, None, None, :]
    # Gate and up have the same row.
    at = k + half * (shape.size if shape.activation is None else 0)
    for part in gl.static_range(shape.parts):
        for turn in gl.static_range(STEPS):
            start = turn * _WARPS * _SPAN
            numbers = gl.load(
                x + 2 * part * shape.size + start + at, mask=start + k + half * 0 < shape.size, other=0.0
            )
            numbers = (numbers.to(gl.float32) * _LARGER).to(gl.bfloat16)
            row.index(part * STEPS + turn).store(numbers.permute([2, 1, 0, 3]))


@gluon.jit
def multiply_block(words, exponents, x, block: gl.constexpr):
    """Return products of a block, [W, rows, 8] float32, 2 ** 64 as large as they are.

    Args:
        words: see load_words and load_two_words.
        exponents: see load_exponents and load_two_exponents.
        x: see load_x.
        block: block of the span.
    """
    numbers = gl.inline_asm_elementwise(
        _NUMBERS[block], "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    products = mma_v2(numbers, x, gl.zeros([_WARPS, _ROWS, 8], gl.float32, PRODUCT))
    bits = exponents << 23 - 8 * block if block < 3 else exponents >> 1
    return products * gl.expand_dims((bits & 0x7F800000).to(gl.float32, bitcast=True), 2)


@gluon.jit
def load_x(row, plane, block: gl.constexpr):
    """Return a block of both halves' rows of x, [W, 32, 8], a right operand of tensor cores."""
    B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    PLANES: gl.constexpr = row.shape[0] * BLOCKS
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    planes = row._reinterpret(gl.bfloat16, [PLANES, _WARPS, 2, _BLOCK], PLAIN)
    x = planes.index(plane * BLOCKS + block).load(gl.SliceLayout(2, _ROW))
    x = gl.expand_dims(x, 2).broadcast_to([_WARPS, 2, 4, _BLOCK])
    return gl.convert_layout(x.reshape([_WARPS, 8, _BLOCK]).permute([0, 2, 1]), B, assert_trivial=True)


@gluon.jit
def load_words(words, half: gl.constexpr):
    """Return half of a copy of gate and up as units of 16 bits, [W, rows, 32], a left operand."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
    halves = words._reinterpret(gl.int16, [2, _WARPS, _ROWS, _BLOCK], SHARED)
    return halves.index(half).load(gl.DotOperandLayout(0, PRODUCT, 8))


@gluon.jit
def load_exponents(exponents, half: gl.constexpr):
    """Return the exponents of half of a copy of gate and up, [W, rows] int32."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    halves = exponents._reinterpret(gl.int32, [2, _WARPS, _ROWS], SHARED)
    return halves.index(half).load(gl.SliceLayout(2, PRODUCT))


@gluon.jit
def load_two_words(words, place):
    """Return two experts' words, in the copies from `place` on, as load_words does."""
    A: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
    SIZES: gl.constexpr = [_WARPS, _COLUMNS, _BLOCK]
    first = words.index(place)._reinterpret(gl.int16, SIZES, SHARED).load(_HALF)
    second = words.index(place + 1)._reinterpret(gl.int16, SIZES, SHARED).load(_HALF)
    both = gl.join(first, second).permute([0, 3, 1, 2]).reshape([_WARPS, _ROWS, _BLOCK])
    return gl.convert_layout(both, A, assert_trivial=True)


@gluon.jit
def load_two_exponents(exponents, place):
    """Return two experts' exponents, [W, rows] int32."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)
    SIZES: gl.constexpr = [_WARPS, _COLUMNS]
    first = exponents.index(place)._reinterpret(gl.int32, SIZES, SHARED).load(_EXPONENTS)
    second = exponents.index(place + 1)._reinterpret(gl.int32, SIZES, SHARED).load(_EXPONENTS)
    both = gl.join(first, second).permute([0, 2, 1]).reshape([_WARPS, _ROWS])
    return gl.convert_layout(both, gl.SliceLayout(2, PRODUCT), assert_trivial=True)


@gluon.jit
def load_choice(operands, shape):
    """Return the token's experts and their factors, a tuple each."""
    experts = ()
    factors = ()
    for index in gl.static_range(shape.chosen):
        experts = experts + (gl.load(operands.experts + index),)  # noqa: RUF005
        factors = factors + (gl.load(operands.factors + index),)  # noqa: RUF005
    return experts, factors


@gluon.jit
def load_epilogue(operands, out, experts, number, column, inside, num_columns, shape):
    """Return the operands of a tile's epilogue.

    Args:
        operands, out, num_columns, shape: see mxfp4_gemv_kernel.
        experts: see load_choice.
        number: the index of gate and up's expert.
        column: columns of the results.
        inside: which of them exist.

    Returns:
        The biases of gate and of up, or for down of each expert; and the residual, 0.0 without one.
    """
    biases = ()
    old = 0.0
    if operands.bias is not None:
        if shape.activation is None:
            for index in gl.static_range(shape.chosen):
                bias = _load_bias(operands, experts[index], column, inside, num_columns, shape)
                biases = biases + (bias,)  # noqa: RUF005
        else:
            expert = experts[0]
            for index in gl.static_range(1, shape.chosen):
                expert = gl.where(number == index, experts[index], expert)
            for half in gl.static_range(2):
                at = half * num_columns + column
                bias = _load_bias(operands, expert, at, inside, 2 * num_columns, shape)
                biases = biases + (bias,)  # noqa: RUF005
    if shape.adds:
        old = gl.load(out + column, mask=inside, other=0.0).to(gl.float32)
    return biases, old


@gluon.jit
def _load_bias(operands, expert, column, inside, num_weight_rows, shape):
    """Return an expert's biases, 0 if another rank holds it."""
    at = operands.bias + expert.to(gl.int64) * num_weight_rows + column
    return gl.load(at, mask=inside & (expert < shape.held), other=0.0).to(gl.float32)


@gluon.jit
def finish(sums, biases, factors, shape, OUT: gl.constexpr):
    """Return the results of a tile, without the residual.

    Args:
        sums: the warps' sums of gate and of up, [2, W, rows] in shared memory; for down only the first, the
            sums of two experts times their factors.
        biases: see load_epilogue.
        factors: see load_choice.
        shape: see mxfp4_gemv.Shape.
        OUT: layout of the results.
    """
    if shape.activation is None:
        result = gl.sum(sums.index(0).slice(0, _COLUMNS, 1).load(OUT.parent), 0)
        result += gl.sum(sums.index(0).slice(_COLUMNS, _COLUMNS, 1).load(OUT.parent), 0)
        for index in gl.static_range(len(biases)):
            result += factors[index] * biases[index]
    else:
        gate = gl.sum(sums.index(0).load(OUT.parent), 0)
        up = gl.sum(sums.index(1).load(OUT.parent), 0)
        if len(biases) > 0:
            gate += biases[0]
            up += biases[1]
        result = gate_and_up(gate, up, shape.activation)
    return result
