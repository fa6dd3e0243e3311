"""Compiles the GEMM of MXFP4 experts for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.mxfp4.mxfp4_persistent import (
    NUM_WARPS,
    Operands,
    Shape,
    mxfp4_persistent_kernel,
)
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import ATOM, make_tiling

# K, rows of a tile, activation, whether there are biases.
CASES = {
    "gate and up, 16 rows": (2880, 16, "clamped_swiglu", True),
    "gate and up, 32 rows": (2880, 32, "clamped_swiglu", True),
    "gate and up, 128 rows": (2880, 128, "clamped_swiglu", True),
    "down, 8 rows": (2880, 8, None, True),
    "down, 64 rows": (2880, 64, None, True),
    "down, 128 rows": (768, 128, None, False),
}


def compile_case(size, rows, activation, biased):
    """Facts, and what does not fit into registers."""
    is_gated = activation is not None
    box = [1, 8, 2, 8, 16] if is_gated else [1, 128, 16]
    tiling = make_tiling(rows)
    shape = (size, rows, tiling.stages, activation)
    arguments = [
        descriptor("bf16", 2, [2, rows, ATOM], 128),
        descriptor("i32", 4, box, 64),
        Operands("*i32", "*bf16" if biased else None, "*i32", None if is_gated else "*i32"),
        *("*bf16", "i32", Shape(*map(tl.constexpr, shape))),
    ]
    options = {"num_warps": NUM_WARPS, "maxnreg": tiling.registers, "launch_pdl": True}
    compiled = compiled_kernel(mxfp4_persistent_kernel, arguments, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {
        "spills": count_spills(code),
        "products": len(re.findall(r"\bHGMMA\b", code)),
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code)),
        "programs": tiling.programs,
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
