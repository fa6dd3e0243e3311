"""Compiles the product of packed weights for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import compiled_kernel, count_spills, descriptor, figures_of, inspect_cubin

from octavo.layers.linear.grouped.hopper.gemm import MAX_REGISTERS, NUM_WARPS
from octavo.layers.linear.grouped.hopper.kernel import Shape, hopper_medium_kernel
from octavo.layers.linear.grouped.hopper.tiling import ATOM, TILE, make_tiling
from octavo.layers.linear.grouped.result import Result
from octavo.layers.linear.grouped.weight import PLANE

# Rows of x, tiles of the weight, columns of a group, dtype of x and of the result, what is fused.
CASES = {
    "128 rows": (128, 2, 128, "bf16", "bf16", None, False),
    "128 rows, gated": (128, 2, 128, "bf16", "bf16", "silu", False),
    "64 rows, parts": (64, 2, 64, "fp16", "fp32", None, False),
    "32 rows, small groups": (32, 2, 32, "bf16", "bf16", None, True),
}


def compile_case(rows, tiles, group, kind, result_kind, activation, adds):
    """Facts, and how many wgmmas there are and end a chain of those that run on without a wait."""
    tiling = make_tiling(rows, tiles)
    shape = (group, rows, tiles, tiling.row_stages, tiling.word_stages, activation, adds)
    words = [TILE, PLANE] if activation is None else [TILE // 16, 2, 8, PLANE]
    arguments = [
        *(descriptor(kind, 2, [rows, ATOM]), descriptor("i32", 4, words), "*i32"),
        Result("*" + result_kind, "i32", "i32", None, "fp32"),
        *["i32"] * 4,
        Shape(*map(tl.constexpr, shape)),
    ]
    compiled = compiled_kernel(
        hopper_medium_kernel, arguments, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS, launch_pdl=True
    )
    code = inspect_cubin(compiled, "nvdisasm", "-c")
    chains = re.findall(r"HGMMA.*", code)
    return figures_of(compiled) | {
        "wgmmas": len(chains),
        "chains": sum("gsb0" in line for line in chains),
        "spills": count_spills(code),
    }


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
