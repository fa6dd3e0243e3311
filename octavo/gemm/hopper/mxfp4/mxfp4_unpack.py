"""From words of MXFP4 to the operand that tensor cores take: numbers in bfloat16, in registers.

Words of 128 rows are read as units of 16 bits in the layout of wgmma's first operand, two units at a time: a
register is a word, and holds two neighbouring numbers of each block (see mxfp4_weight.pack_words). So nothing
moves between threads, and blocks 2 a and 2 a + 1 are the 64 columns of atom a.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.mxfp4.mxfp4_bits import BITS
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import ATOM, TILE

_ATOM = gl.constexpr(ATOM)
_TILE = gl.constexpr(TILE)


@gluon.constexpr_function
def _number_asm(block):
    """Return PTX for two numbers of a block, times the scale that is twice in a word."""
    return (
        "{ .reg .b32 bits, more, zero; mov.b32 zero, 0x80008000;\n"
        + BITS[block]
        + "fma.rn.bf16x2 $0, bits, $2, zero; }"
    )


@gluon.constexpr_function
def _scale_asm(block):
    """Return PTX for a block's power of two, twice in a word, from a row's four exponents."""
    return f"{{ .reg .b32 both; prmt.b32 both, $1, 0, {0x4040 + 0x101 * block:#x}; shl.b32 $0, both, 7; }}"


@gluon.jit
def _numbers(units, exponents, block: gl.constexpr):
    """Return a block's numbers, [128, 32]."""
    scale = gl.inline_asm_elementwise(
        _scale_asm(block), "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.inline_asm_elementwise(
        _number_asm(block),
        # A scale for each of two numbers: the same one.
        "=r,r,r,r",
        [units, scale[:, None]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def unpacked(units, exponents, atom: gl.constexpr, A: gl.constexpr):
    """Return an atom of numbers, [128, 64], a left operand.

    Args:
        units: of the words of a span, [128, 32] int16.
        exponents: [128] int32, four of each row.
        atom: 0 or 1.
        A: layout of left operands.
    """
    left, right = _numbers(units, exponents, 2 * atom), _numbers(units, exponents, 2 * atom + 1)
    both = gl.join(left, right).permute([0, 2, 1]).reshape([_TILE, _ATOM])
    return gl.convert_layout(both, A, assert_trivial=True)
