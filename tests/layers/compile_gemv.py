"""Compiles the GEMV for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.floats.dense_gemv_tiling import ATOM_BYTES, TILE_ROWS, WARPS, gemv_tiling_for
from octavo.gemm.hopper.floats.float_gemv_kernel import Operands, Shape, float_gemv_kernel

# K, kind of the weight, whether x is normed, activation, residual, height and width of a scale.
CASES = {
    "bfloat16": (4096, "bf16", True, None, False, 0, 0),
    "bfloat16, long": (12288, "bf16", False, None, True, 0, 0),
    "bfloat16, short": (1024, "bf16", True, "silu", False, 0, 0),
    "float8 rows, gated": (4096, "fp8e4nv", True, "silu", False, 1, 4096),
    "float8 tiles, gated": (4096, "fp8e4nv", True, "silu", False, 128, 128),
    "float8 tiles, long": (12288, "fp8e4nv", False, None, True, 128, 128),
    "float8 rows, longest": (25600, "fp8e4nv", False, None, True, 1, 25600),
}


def compile_case(size, kind, norm, activation, adds, height, width):
    """Facts, and how many instructions read or write what does not fit into registers."""
    itemsize = 2 if kind == "bf16" else 1
    tiling = gemv_tiling_for(size, itemsize)
    halves = 1 if activation is None else 2
    box = [tiling.blocks * WARPS, halves, TILE_ROWS // halves, ATOM_BYTES // itemsize]
    shape = (size, halves, tiling.blocks, tiling.stages, norm, activation, adds, height, width)
    arguments = [
        descriptor(kind, itemsize, box, ATOM_BYTES),
        Operands("*bf16", "*bf16" if norm else None, "*fp32" if height else None),
        *("*bf16", "i32", "i32", "fp32"),
        Shape(*map(tl.constexpr, shape)),
    ]
    options = {"num_warps": WARPS, "maxnreg": tiling.registers, "launch_pdl": True}
    compiled = compiled_kernel(float_gemv_kernel, arguments, **options)
    spills = count_spills(code_of(compiled))
    return figures_of(compiled) | {
        **{"spills": spills, "stages": tiling.stages, "blocks": tiling.blocks},
        "step_bytes": tiling.blocks * WARPS * TILE_ROWS * ATOM_BYTES,
        "waits": compiled.asm["ttgir"].count("ttng.wait_barrier"),
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
