"""From packed words to the operand that tensor cores take: weights in floats, in registers.

The words of 128 rows are read in the layout of wgmma's first operand, two neighbours at a time. Their lower
or upper halves side by side are a register; four bits of each are two neighbouring weights of a plane:

    registers of a thread    word j          word j + 1
    lower halves             ....3210        ....3210        planes 0 to 3: columns 32 plane + j, + j + 1
    upper halves             7654....        7654....        planes 4 to 7

So nothing moves between threads, and planes 2 a and 2 a + 1 are the 64 columns of atom a.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.forms.packed import TILE
from octavo.gemm.hopper.packed.packed_gemm_tiling import ATOM

_ATOM = gl.constexpr(ATOM)
_TILE = gl.constexpr(TILE)
# Atoms of half a span.
_ATOMS = gl.constexpr(2)
# Two 16-bit floats whose last bits are worth 1, 128 or 1024, and what is added once they hold q as well.
_BFLOAT16_ORIGIN, _BFLOAT16_OFFSET = 0x43004300, 0xC308C308
_FLOAT16_ORIGIN, _FLOAT16_OFFSET = 0x64006400, 0xE400E400


@gluon.constexpr_function
def scale_asm(plane, is_bfloat16):
    """Return PTX for two 16-bit numbers' plane of 4 bits: (q + origin + offset) * scale + minimum."""
    kind = "bf16x2" if is_bfloat16 else "f16x2"
    origin = _BFLOAT16_ORIGIN if is_bfloat16 else _FLOAT16_ORIGIN
    offset = _BFLOAT16_OFFSET if is_bfloat16 else _FLOAT16_OFFSET
    # Scale and minimum are twice in a word, and words come in pairs, like the numbers. 0xEA: (a and b) or c.
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
    """Return a scale, and what is added to its products, each twice in a word."""
    if dtype == gl.bfloat16:
        # scale * (q - 8) + (min + 8 scale): small numbers, so that bfloat16 holds them well.
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
def unpacked(bits, pairs, half: gl.constexpr, atom: gl.constexpr, group: gl.constexpr, dtype: gl.constexpr):
    """Return an atom of 64 columns as floats, of half a span's bits and the span's pairs."""
    FIRST: gl.constexpr = (half * _ATOMS + atom) * _ATOM
    scale, low = _twice(pairs[FIRST // group], dtype)
    left = _scaled(bits, 2 * atom, scale[:, None], low[:, None], dtype)
    if group < _ATOM:
        scale, low = _twice(pairs[FIRST // group + 1], dtype)
    right = _scaled(bits, 2 * atom + 1, scale[:, None], low[:, None], dtype)
    return gl.join(left, right).permute([0, 2, 1]).reshape([_TILE, _ATOM])
