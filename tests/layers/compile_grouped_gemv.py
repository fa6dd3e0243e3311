"""Compiles the GEMV of packed weights for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.packed.packed_gemv_kernel import Operands, Shape, packed_gemv_kernel
from octavo.gemm.hopper.packed.packed_gemv_tiling import WARPS, tiling_for

# K, dtype of x, whether it is normed, activation, residual.
CASES = {
    "normed": (4096, "bf16", True, None, False),
    "gated": (4096, "fp16", True, "silu", False),
    "short": (1024, "bf16", True, None, False),
    "long": (12288, "bf16", False, None, True),
    "longest": (16384, "bf16", False, None, True),
}


def compile_case(size, kind, norm, activation, adds):
    """Facts, and numbers of instructions: products of bytes, and what does not fit into registers."""
    tiling = tiling_for(size)
    halves = 1 if activation is None else 2
    own, spans = TILE_ROWS // halves, tiling.blocks * WARPS
    shape = (size, size, halves, tiling.blocks, tiling.stages, norm, activation, adds)
    arguments = [
        descriptor("i32", 4, [2, spans, halves, own, 16], 64),
        descriptor("i32", 4, [2 * spans, 1, own], 4 * own),
        Operands(f"*{kind}", f"*{kind}" if norm else None),
        *(f"*{kind}", "i32", "fp32", "fp32"),
        Shape(*map(tl.constexpr, shape)),
    ]
    options = {"num_warps": WARPS, "maxnreg": tiling.registers, "launch_pdl": True}
    compiled = compiled_kernel(packed_gemv_kernel, arguments, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {
        "spills": count_spills(code),
        "byte_products": len(re.findall(r"\bIMMA\.16832\.S8\.S8\b", code)),
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
