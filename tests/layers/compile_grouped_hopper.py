"""Compiles the product of packed weights for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.forms.packed import PLANE, TILE
from octavo.gemm.hopper.packed.packed_gemm import NUM_WARPS
from octavo.gemm.hopper.packed.packed_gemm_kernel import Shape, packed_gemm_kernel
from octavo.gemm.hopper.packed.packed_gemm_tiling import ATOM, make_tiling
from octavo.gemm.hopper.packed.split_k import Parts
from octavo.gemm.portable.packed.packed_result import Result

# Rows of x of a block, blocks, programs on an SM, columns of a group, dtype, what is fused.
CASES = {
    "32 rows": (32, 1, 2, 128, "bf16", None, True),
    "32 rows, gated, small groups": (32, 1, 2, 32, "bf16", "silu", False),
    "64 rows": (64, 1, 1, 64, "fp16", None, False),
    "3 times 32 rows": (32, 3, 1, 128, "bf16", "silu", False),
    "128 rows, gated": (128, 1, 1, 128, "bf16", "silu", False),
}


def compile_case(rows, blocks, per_sm, group, kind, activation, adds):
    """Facts, and how many wgmmas there are and end a chain of those that run on without a wait."""
    tiling = make_tiling(rows, blocks, 132, per_sm, group)
    shape = (group, rows, blocks, tiling.atoms, tiling.row_stages, tiling.word_stages, activation, adds)
    words = [TILE, PLANE] if activation is None else [TILE // 16, 2, 8, PLANE]
    groups = 256 // group
    pairs = [groups, TILE] if activation is None else [groups, TILE // 16, 2, 8]
    arguments = [
        *(descriptor(kind, 2, [rows, ATOM]), descriptor("i32", 4, words), descriptor("i32", 4, pairs, 0)),
        Result("*" + kind, "i32", "i32", None, "fp32"),
        Parts("*fp32", "*i32"),
        *["i32"] * 5,
        Shape(*map(tl.constexpr, shape)),
    ]
    compiled = compiled_kernel(
        packed_gemm_kernel, arguments, num_warps=NUM_WARPS, maxnreg=tiling.max_registers, launch_pdl=True
    )
    code = code_of(compiled)
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
