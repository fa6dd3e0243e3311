"""Compiles the GEMV of MXFP4 experts for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.mxfp4.mxfp4_gemv import Operands, Shape, mxfp4_gemv_kernel
from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import REGISTERS, WARPS, copy_boxes, mxfp4_gemv_tiling_for

# K, experts of a token, activation, whether there are biases, and a residual.
CASES = {
    "gate and up": (2880, 4, "clamped_swiglu", True, False),
    "down": (2880, 4, None, True, True),
    "gate and up, plain": (2048, 8, "silu", False, False),
    "down, many experts": (768, 8, None, False, False),
}


def compile_case(size, chosen, activation, biased, adds):
    """Facts, and numbers of instructions: products, and what does not fit into registers."""
    is_gated = activation is not None
    tiling, boxes = mxfp4_gemv_tiling_for(size, chosen, is_gated=is_gated), copy_boxes(is_gated=is_gated)
    shape = (size, 32, chosen, tiling.parts, tiling.units, tiling.stages, activation, adds)
    arguments = [
        descriptor("i32", 4, boxes[0], 64),
        descriptor("i32", 4, boxes[1], 4 * boxes[1][-1]),
        Operands("*bf16", "*bf16" if biased else None, "*i32", "*fp32"),
        *("*bf16", "i32", Shape(*map(tl.constexpr, shape))),
    ]
    options = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True}
    compiled = compiled_kernel(mxfp4_gemv_kernel, arguments, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {
        "spills": count_spills(code),
        "products": len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", code)),
        "stages": tiling.stages,
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
