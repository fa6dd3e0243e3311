"""The kernel of few_linear: each warp streams its spans of a packed weight through its tensor cores.

    warp w   spans w, w + W, ...      words from memory, 16 bytes a thread, one span ahead
             planes of integers       bits become floats without arithmetic: q + ORIGIN
             plane of x               where it meets the integers: nothing passes shared memory
             sums += integers * x,    of a group, then scaled: scale * (sums - ORIGIN * total) + min * total
             total += x
    last     the warps' sums are added up

A tile of 32 words of a row, in the layout of a tensor core's operand, gives each thread four neighbours of
every 16: they are loaded at once, and so are the four columns of x that each of their planes meets.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.layers.triton.activation import activate


def _unpack_asm(origin: int) -> str:
    """PTX for two words: planes of 4 bits as 16-bit floats of q + the origin, whose bits are given."""
    lines = ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for plane in range(8):
        half = "low" if plane < 4 else "high"
        if plane % 4:
            lines.append(f"shr.u32 moved, {half}, {plane % 4 * 4};")
        # 0xEA: (a and b) or c.
        lines.append(f"lop3.b32 ${plane}, {'moved' if plane % 4 else half}, 0x000F000F, {origin:#x}, 0xEA;")
    return "{ .reg .b32 low, high, moved;\n" + "\n".join(lines) + "\n}"


# 128 in bfloat16 and 1024 in float16: their last bits are worth 1.
_ASM_BFLOAT16 = gl.constexpr(_unpack_asm(0x43004300))
_ASM_FLOAT16 = gl.constexpr(_unpack_asm(0x64006400))
_EIGHT_OF_ONE = gl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


class Shape(NamedTuple):
    """Form of the weight, tiling and what is fused, all constants of the kernel.

    Attributes:
        bits: 4 or 8.
        group: columns of a group.
        size: K.
        rows: of x, a multiple of 8.
        columns: rows of the weight per program, a multiple of 16.
        warps: that share K.
        norm: whether x is normed.
        bias: whether there is one.
        activation: name or None.
        adds: whether the result is added to the residual.
        overlap: whether the next kernel may start early.
    """

    bits: int
    group: int
    size: int
    rows: int
    columns: int
    warps: int
    norm: bool
    bias: bool
    activation: str | None
    adds: bool
    overlap: bool


@gluon.jit
def _planes(words, bits: gl.constexpr, dtype: gl.constexpr):
    """Return the planes of words as floats: q + ORIGIN of 4 bits, q of 8."""
    if bits == 8:
        return (
            (words << 24 >> 24).to(gl.float32).to(dtype),
            (words << 16 >> 24).to(gl.float32).to(dtype),
            (words << 8 >> 24).to(gl.float32).to(dtype),
            (words >> 24).to(gl.float32).to(dtype),
        )
    else:
        if dtype == gl.bfloat16:
            return gl.inline_asm_elementwise(
                _ASM_BFLOAT16, _EIGHT_OF_ONE, [words], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2
            )
        else:
            return gl.inline_asm_elementwise(
                _ASM_FLOAT16, _EIGHT_OF_ONE, [words], dtype=(gl.float16,) * 8, is_pure=True, pack=2
            )


@gluon.jit(do_not_specialize=["num_rows"])
def few_linear_kernel(
    x_ptr, words_ptr, pairs_ptr, bias_ptr, norm_weight_ptr, out_ptr,
    num_rows, num_weight_rows, stride_x, stride_out, num_words, factor, eps,
    shape: gl.constexpr,
):  # fmt: skip
    """Grid: (ceil(columns of the result / columns of a program),).

    With an activation, the first half of a program's columns is gate, the other one up.
    """
    SIZE: gl.constexpr = shape.size
    GROUP: gl.constexpr = shape.group
    WARPS: gl.constexpr = shape.warps
    COLUMNS: gl.constexpr = shape.columns
    SPAN: gl.constexpr = 1024 // shape.bits
    HALVES: gl.constexpr = 1 if shape.activation is None else 2
    OWN: gl.constexpr = COLUMNS // HALVES
    # Groups of half a plane: the other half of x is zero.
    PASSES: gl.constexpr = 32 // GROUP if GROUP < 32 else 1
    PLANES: gl.constexpr = GROUP // 32 if GROUP > 32 else 1
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ORIGIN: gl.constexpr = 0 if shape.bits == 8 else 128 if dtype == gl.bfloat16 else 1024
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    if shape.overlap:
        gdc_launch_dependents()
    num_columns = num_weight_rows // HALVES
    first = gl.program_id(0) * OWN

    # [warp, column, word]
    warp_a = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    index_a = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    # Columns past the end repeat the last one and are not stored.
    row_a = gl.minimum(first + index_a % OWN, num_columns - 1) + index_a // OWN * num_columns
    words_at = words_ptr + row_a.to(gl.int64) * num_words + warp_a * 32 + word
    # [warp, column, 1]
    warp_s = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
    index_s = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    row_s = gl.minimum(first + index_s % OWN, num_columns - 1) + index_s // OWN * num_columns
    pairs_at = pairs_ptr + warp_s * (SPAN // GROUP) * num_weight_rows + row_s
    # [warp, k, row]
    warp_b = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    row_b = gl.arange(0, shape.rows, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    at = warp_b * SPAN + k
    x_at = x_ptr + row_b.to(gl.int64) * stride_x + at

    words = gl.load(words_at, mask=warp_a * SPAN < SIZE, other=0)
    if shape.overlap:
        gdc_wait()
    ones = gl.full([WARPS, COLUMNS, 32], 1.0, dtype, A)
    out = gl.zeros([WARPS, COLUMNS, shape.rows], gl.float32, SUMS)
    squares = gl.zeros([WARPS, 32, shape.rows], gl.float32, B)
    for start in range(0, SIZE, SPAN * WARPS):
        next_words = gl.load(
            words_at + (start // SPAN + WARPS) * 32,
            mask=start + (WARPS + warp_a) * SPAN < SIZE,
            other=0,
        )
        planes = _planes(words, shape.bits, dtype)
        for step in gl.static_range(SPAN // GROUP):
            sums = gl.zeros([WARPS, COLUMNS, shape.rows], gl.float32, SUMS)
            total = gl.zeros([WARPS, COLUMNS, shape.rows], gl.float32, SUMS)
            pair = gl.load(
                pairs_at + (start // GROUP + step) * num_weight_rows,
                mask=start + warp_s * SPAN < SIZE,
                other=0,
            )
            for plane in gl.static_range(step // PASSES * PLANES, (step // PASSES + 1) * PLANES):
                inside = start + plane * 32 + at < SIZE
                if PASSES == 2:
                    inside &= k // GROUP == step % PASSES
                x = gl.load(x_at + start + plane * 32, mask=inside & (row_b < num_rows), other=0.0)
                if shape.norm:
                    wide = x.to(gl.float32)
                    squares += wide * wide
                    norm_weight = gl.load(norm_weight_ptr + start + plane * 32 + at, mask=inside, other=0.0)
                    x = (wide * norm_weight.to(gl.float32)).to(dtype)
                sums = mma_v2(planes[plane], x, sums)
                total = mma_v2(ones, x, total)
            scale = (pair & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            low = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            out += scale * sums + (low - ORIGIN * scale) * total
        words = next_words

    result = gl.sum(out, 0) * factor
    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    index = gl.arange(0, COLUMNS, gl.SliceLayout(1, RESULT))
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, RESULT))[None, :]
    if shape.norm:
        mean = gl.sum(gl.sum(squares, 0), 0) / SIZE
        result *= gl.convert_layout(gl.rsqrt(mean + eps), gl.SliceLayout(0, RESULT))[None, :]
    if shape.bias:
        bias_row = gl.minimum(first + index % OWN, num_columns - 1) + index // OWN * num_columns
        result += gl.load(bias_ptr + bias_row).to(gl.float32)[:, None]
    if shape.activation is not None:
        # Gate and up of a column are the same thread's.
        gate, up = gl.split(result.reshape([2, OWN, shape.rows]).permute([1, 2, 0]))
        result = gl.convert_layout(activate(gate, shape.activation) * up, RESULT)
    column = first + gl.arange(0, OWN, gl.SliceLayout(1, RESULT))[:, None]
    stored = (column < num_columns) & (row < num_rows)
    out_at = out_ptr + row.to(gl.int64) * stride_out + column
    if shape.adds:
        result += gl.load(out_at, mask=stored, other=0.0).to(gl.float32)
    gl.store(out_at, result.to(dtype), mask=stored)
