"""Products of packed weights and the digits of a row, exactly, on tensor cores: `mma` of bytes.

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
from octavo.gemm.hopper.gemv_tiles import ceil_div
from octavo.gemm.hopper.packed.packed_gemv_tiling import SPAN, WARPS
from octavo.kernels.ring import free_stage, wait_for_stage

_WARPS = gl.constexpr(WARPS)
_ROWS = gl.constexpr(TILE_ROWS)
_SPAN = gl.constexpr(SPAN)
_DIGITS = gl.constexpr(4)

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
# Of digits, [W, halves, digits, 64 bytes], as tensor cores want [W, 64 bytes, 8].
_DIGITS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        [[0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [WARPS, 2, 4, 64],
    )
)
# Of pairs of a tile and of half of it, [W, halves of a span, rows].
_PAIRS_LANES = [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
_PAIRS_WARPS = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 0, 8]], _PAIRS_LANES, _PAIRS_WARPS, [], [WARPS, 2, TILE_ROWS])
)
_HALF_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout([], _PAIRS_LANES, _PAIRS_WARPS, [], [WARPS, 2, TILE_ROWS // 2])
)


@gluon.jit
def half_mask():
    """Return bytes [W, halves of a span, digits, 64], -1 where a word's byte is of that half, else 0."""
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, _DIGITS_LAYOUT))))
    byte = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, _DIGITS_LAYOUT))))
    keeps = (byte // 2 % 2)[None, None, None, :] == half[None, :, None, None]
    return gl.where(keeps, -1, 0).to(gl.int8).broadcast_to([_WARPS, 2, _DIGITS, 64])


@gluon.jit
def multiply_tile(pipe, row, totals, mask, after, tile, shape):
    """Return a tile's products of each warp, [W, rows] float32.

    Args:
        pipe, shape: see packed_gemv_kernel.
        row, totals: see keep_digits.
        mask: half_mask's.
        after: what sums of digits are to be multiplied by.
        tile: of the program.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, _PRODUCT, 16)
    ATOMS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=3)
    PLANES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    TOTALS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LOWS: gl.constexpr = gl.SliceLayout(3, _SUMS)
    STEPS: gl.constexpr = ceil_div(shape.size, shape.blocks * _WARPS * _SPAN)
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
    """Return words' even planes and their odd ones, as bytes."""
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
        mask: half_mask's.
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
        stage: to be read.
        block: span of a warp.
        shape: see kernel.
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
