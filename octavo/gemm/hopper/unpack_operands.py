"""Weights of 4 bits become operands of tensor cores: 16-bit floats, in registers.

Words of 128 rows are read in the layout of wgmma's first operand, so that nothing moves between threads: each
thread unpacks the numbers that it multiplies.

Integers: two neighbouring words at a time. Their lower or upper halves side by side are a register; four bits
of each are two neighbouring weights of a plane, and planes 2 a and 2 a + 1 are the 64 columns of atom a:

    registers of a thread    word j          word j + 1
    lower halves             ....3210        ....3210        planes 0 to 3: columns 32 plane + j, + j + 1
    upper halves             7654....        7654....        planes 4 to 7

MXFP4: two units of 16 bits at a time. A register is a word, which holds two neighbouring numbers of each
block (see forms.mxfp4_experts.pack_words), and blocks 2 a and 2 a + 1 are the 64 columns of atom a.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.forms.packed import TILE
from octavo.gemm.hopper.packed.packed_gemm_tiling import ATOM

_ATOM = gl.constexpr(ATOM)
_TILE = gl.constexpr(TILE)
# Atoms in half a span.
_ATOMS = gl.constexpr(2)
# Two 16-bit floats whose last bit is worth 1, 128 in bfloat16 and 1024 in float16; and what takes that origin
# off again once their low bits hold q.
_BFLOAT16_ORIGIN, _BFLOAT16_OFFSET = 0x43004300, 0xC308C308
_FLOAT16_ORIGIN, _FLOAT16_OFFSET = 0x64006400, 0xE400E400

# For each block of a word in $1, PTX that leaves two bfloat16, 2 ** -126 as large, in `bits`; it needs the
# registers `bits` and `more`, .b32. portable.experts.mxfp4_tiles says what the bits mean, and unpacks them in
# Triton; forms.mxfp4_experts lays them out.
MXFP4_BITS = (
    "and.b32 bits, $1, 0x81C081C0;",
    "shf.r.wrap.b32 bits, $1, $1, 6; and.b32 bits, bits, 0x81C081C0;",
    "shl.b32 bits, $1, 4; and.b32 bits, bits, 0x81C081C0;",
    """shf.r.wrap.b32 bits, $1, $1, 2; shl.b32 more, $1, 6;
    and.b32 bits, bits, 0x81808180; and.b32 more, more, 0x00400040; or.b32 bits, bits, more;""",
)


@gluon.constexpr_function
def scale_asm(plane, is_bfloat16):
    """Return PTX that turns a plane's 4 bits into two numbers: (q + origin + offset) * scale + minimum."""
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    origin = _BFLOAT16_ORIGIN if is_bfloat16 else _FLOAT16_ORIGIN
    offset = _BFLOAT16_OFFSET if is_bfloat16 else _FLOAT16_OFFSET
    # A word holds scale or minimum twice, and words come in pairs, like the numbers. 0xEA is (a and b) or c.
    return (
        "{ .reg .b32 bits, offset;\n"
        f"shr.u32 bits, $1, {4 * plane};\n"
        f"lop3.b32 bits, bits, 0x000F000F, {origin:#x}, 0xEA;\n"
        f"mov.b32 offset, {offset:#x};\n"
        f"add.rn.{kind} bits, bits, offset;\n"
        f"fma.rn.{kind} $0, bits, $2, $4; }}"
    )


@gluon.jit
def _twice(pair, dtype: gl.constexpr):
    """Return a scale, and the number added to its products, each twice in a word."""
    if dtype == gl.bfloat16:
        # scale * (q - 8) + (min + 8 scale): bfloat16 holds such small numbers well.
        return gl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .f32 scale, low;
            mov.b32 {a, b}, $2; cvt.f32.f16 scale, a; cvt.f32.f16 low, b;
            fma.rn.f32 low, scale, 0f41000000, low;
            cvt.rn.bf16x2.f32 $0, scale, scale; cvt.rn.bf16x2.f32 $1, low, low; }""",
            "=r,=r,r",
            [pair],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 both; mov.b32 both, $2;
            prmt.b32 $0, both, 0, 0x1010; prmt.b32 $1, both, 0, 0x3232; }""",
            "=r,=r,r",
            [pair],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _scaled(bits, plane: gl.constexpr, scale, low, dtype: gl.constexpr):
    """Return a plane of 16-bit numbers as floats, scaled."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            scale_asm(plane, True),
            "=r,r,r,r,r,r",
            [bits, scale, low],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            scale_asm(plane, False),
            "=r,r,r,r,r,r",
            [bits, scale, low],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def unpack_integers(
    bits, pairs, half: gl.constexpr, atom: gl.constexpr, group: gl.constexpr, dtype: gl.constexpr
):
    """Return an atom of 64 columns as floats, from half a span's bits and the span's pairs."""
    FIRST: gl.constexpr = (half * _ATOMS + atom) * _ATOM
    scale, low = _twice(pairs[FIRST // group], dtype)
    left = _scaled(bits, 2 * atom, scale[:, None], low[:, None], dtype)
    if group < _ATOM:
        scale, low = _twice(pairs[FIRST // group + 1], dtype)
    right = _scaled(bits, 2 * atom + 1, scale[:, None], low[:, None], dtype)
    return gl.join(left, right).permute([0, 2, 1]).reshape([_TILE, _ATOM])


@gluon.constexpr_function
def _mxfp4_number_asm(block):
    """Return PTX for two numbers of a block, times the scale that a word holds twice."""
    return (
        "{ .reg .b32 bits, more, zero; mov.b32 zero, 0x80008000;\n"
        + MXFP4_BITS[block]
        + "fma.rn.bf16x2 $0, bits, $2, zero; }"
    )


@gluon.constexpr_function
def _mxfp4_scale_asm(block):
    """Return PTX for a block's power of two, twice in a word, from a row's four exponents."""
    return f"{{ .reg .b32 both; prmt.b32 both, $1, 0, {0x4040 + 0x101 * block:#x}; shl.b32 $0, both, 7; }}"


@gluon.jit
def _mxfp4_numbers(units, exponents, block: gl.constexpr):
    """Return a block's numbers, [128, 32]."""
    scale = gl.inline_asm_elementwise(
        _mxfp4_scale_asm(block), "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.inline_asm_elementwise(
        _mxfp4_number_asm(block),
        # Two numbers are unpacked at a time: each brings the same scale.
        "=r,r,r,r",
        [units, scale[:, None]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def unpack_mxfp4(units, exponents, atom: gl.constexpr, A: gl.constexpr):
    """Return an atom of MXFP4 numbers, [128, 64], a left operand.

    Args:
        units: the words of a span, [128, 32] int16.
        exponents: [128] int32, four of each row.
        atom: 0 or 1.
        A: layout of left operands.
    """
    left, right = _mxfp4_numbers(units, exponents, 2 * atom), _mxfp4_numbers(units, exponents, 2 * atom + 1)
    both = gl.join(left, right).permute([0, 2, 1]).reshape([_TILE, _ATOM])
    return gl.convert_layout(both, A, assert_trivial=True)
