"""Compiles the append kernel for a Hopper GPU, without one; a process of its own, without the interpreter."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "attention"))

from compile_hopper import compile_kernel
from triton.compiler import ASTSource

from octavo.ops.triton.append import Angles, Blocks, Places, Rows, _append_kernel


def compile_append(*, ragged, rotary, dtype="*bf16", cache="*bf16", interleaved=True):
    cu, scale = "*i32" if ragged else None, "*fp32" if cache == "*fp8e4nv" else None
    rows = Rows(dtype, "i32", "i32", cu, "i32", "i32")
    blocks = Blocks(cache, "i32", "i32", "i32", 1, scale)
    angles = Angles(None, 0, None, 0, None, 0)
    if rotary:
        angles = Angles(dtype, "i32", dtype, "i32", "*i32", "i32")
    places = Places("*i32", "i32", "*i32", "i32", "i32", "i32")
    shape = (16, 8, 59, 64, 16 if rotary else 0, interleaved, True, 1 if rotary else 0, 16, 8, 64, 64)
    arguments = (rows, dtype, rows, rows, blocks, blocks, places, angles, "i32", *shape)
    return compile_kernel(_append_kernel, arguments, source_of=ASTSource)


if __name__ == "__main__":
    print(compile_append(ragged=False, rotary=False))
    print(compile_append(ragged=True, rotary=True))
    print(compile_append(ragged=False, rotary=True, cache="*fp8e4nv", interleaved=False))
    print(compile_append(ragged=True, rotary=True, dtype="*fp32", cache="*fp32"))
