"""PTX that takes two neighbouring numbers of MXFP4 out of a word, for kernels in Gluon.

`moe.triton.mxfp4` says what their bits mean, and does the same in Triton; `mxfp4_weight` lays them out.
"""

BITS = (
    "and.b32 bits, $1, 0x81C081C0;",
    "shf.r.wrap.b32 bits, $1, $1, 6; and.b32 bits, bits, 0x81C081C0;",
    "shl.b32 bits, $1, 4; and.b32 bits, bits, 0x81C081C0;",
    """shf.r.wrap.b32 bits, $1, $1, 2; shl.b32 more, $1, 6;
    and.b32 bits, bits, 0x81808180; and.b32 more, more, 0x00400040; or.b32 bits, bits, more;""",
)
"""For each block of a word in $1: statements that leave two bfloat16, 2 ** -126 as large, in `bits`.

They need the registers `bits` and `more`, .b32.
"""
