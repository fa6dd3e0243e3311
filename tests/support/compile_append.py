"""Compiles the append kernel for a Hopper GPU, without one: tests/attention/compile_portable.py runs it."""

from compile_hopper import compile_kernel
from triton.compiler import ASTSource

from octavo.ops.triton.append_kernel import Angles, Blocks, Places, Rows, _append_kernel


def compile_append(*, ragged, rotary, dtype="*bf16", cache="*bf16", interleaved=True):
    cu, scale = "*i32" if ragged else None, "*fp32" if cache == "*fp8e4nv" else None
    rows = Rows(dtype, "i32", "i32", cu, "i32", "i32")
    blocks = Blocks(cache, "i32", "i32", "i32", 1, scale)
    angles = Angles(None, 0, None, 0, None, 0)
    if rotary:
        angles = Angles(dtype, "i32", dtype, "i32", "*i32", "i32")
    places = Places("*i32", "i32", "*i32", "i32", "i32", "i32")
    shape = (16, 8, 59, 64, 16 if rotary else 0, interleaved, True, 1 if rotary else 0, 16, 8, 64, 64)
    arguments = (rows, dtype, rows, rows, blocks, blocks, places, angles, "*i32", "i32", *shape)
    return compile_kernel(_append_kernel, arguments, source_of=ASTSource)


def figures():
    """{form: {registers, stack, shared}}."""
    return {
        "append": compile_append(ragged=False, rotary=False),
        "append ragged rotary": compile_append(ragged=True, rotary=True),
        "append float8": compile_append(ragged=False, rotary=True, cache="*fp8e4nv", interleaved=False),
        "append float32": compile_append(ragged=True, rotary=True, dtype="*fp32", cache="*fp32"),
    }
