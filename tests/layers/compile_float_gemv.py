"""Compiles the GEMV of experts in floats for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS
from octavo.gemm.hopper.floats.expert_gemv_tiling import REGISTERS, float_tiling_for
from octavo.gemm.hopper.floats.float_gemv_kernel import Operands, Shape, float_gemv_kernel

# K, experts of a token, tokens, activation, bytes of a number, numbers that share a scale.
CASES = {
    "gate and up": (2048, 8, 1, "silu", 2, 0),
    "down": (768, 8, 1, None, 2, 0),
    "down, four tokens": (768, 8, 4, None, 2, 0),
    "gate and up, float8": (2048, 8, 1, "silu", 1, 2048),
    "down, float8": (768, 8, 1, None, 1, 768),
    "gate and up, float8 with tiles, four tokens": (2048, 8, 4, "silu", 1, 128),
    "down, float8 with tiles": (768, 8, 1, None, 1, 128),
    "down, two long experts": (14336, 2, 1, None, 2, 0),
}


def compile_case(size, chosen, tokens, activation, itemsize, width):
    """Facts, and numbers of instructions: products, and what does not fit into registers."""
    halves, summed = (1, chosen) if activation is None else (2, 1)
    tiling = float_tiling_for(size, itemsize, tokens, summed)
    shape = (size, halves, tiling.blocks, tiling.stages, False, activation, activation is None)
    shape = (*shape, int(width > 0), width, 128, chosen, summed, tokens)
    box = [tiling.blocks * WARPS, 1, halves, TILE_ROWS // halves, ATOM_BYTES // itemsize]
    arguments = [
        descriptor("fp8e4nv" if width else "bf16", itemsize, box, ATOM_BYTES),
        Operands("*bf16", None, "*fp32" if width else None, None, "*i32", "*fp32"),
        *("*bf16", "i32", "i32", "fp32", Shape(*map(tl.constexpr, shape))),
    ]
    options = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True}
    compiled = compiled_kernel(float_gemv_kernel, arguments, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {
        "spills": count_spills(code),
        "products": len(re.findall(r"\bHMMA\.16816\.F32\b", code)),
        "stages": tiling.stages,
        "blocks": tiling.blocks,
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
