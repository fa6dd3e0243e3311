"""Packed words to floats without arithmetic, on an NVIDIA GPU; imported only where Triton runs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


@gluon.jit
def unpack(words, bits: gl.constexpr, dtype: gl.constexpr):
    """Return the planes of words as floats: q of 8 bits; of 4 bits q + 128, or q + 1024 in float16."""
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
