"""Compiles the GEMV of packed experts for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.floats.dense_gemv_tiling import TILE_ROWS
from octavo.gemm.hopper.packed.packed_expert_tiling import REGISTERS, tiling_for
from octavo.gemm.hopper.packed.packed_gemv_kernel import Operands, Shape, packed_gemv_kernel
from octavo.gemm.hopper.packed.packed_gemv_tiling import WARPS

# K, experts of the token, activation.
CASES = {
    "gate and up": (2048, 8, "silu"),
    "down": (768, 8, None),
    "gate and up, long": (4096, 2, "silu"),
    "down, exact gelu": (1536, 2, None),
    "gate and up, longest": (16384, 2, "gelu"),
    "down, longest": (8192, 2, None),
}


def compile_case(size, chosen, activation):
    """Facts, and numbers of instructions: products, and what does not fit into registers."""
    halves, summed = (1, chosen) if activation is None else (2, 1)
    tiling = tiling_for(size, summed)
    shape = (size, tiling.padded, halves, 1, tiling.stages, False, activation, activation is None)
    shape = (*shape, 128, chosen, summed)
    own = TILE_ROWS // halves
    arguments = [
        descriptor("i32", 4, [1, tiling.box, halves, own, 16], 64),
        descriptor("i32", 4, [1, 2 * tiling.box, 1, own], 4 * own),
        Operands("*bf16", None, None, "*i32", "*fp32", "*fp32"),
        *("*bf16", "i32", "fp32", "fp32", Shape(*map(tl.constexpr, shape))),
    ]
    options = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True}
    compiled = compiled_kernel(packed_gemv_kernel, arguments, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {
        "spills": count_spills(code),
        "products": len(re.findall(r"\bIMMA\b", code)),
        "stages": tiling.stages,
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
