"""Compiles the GEMM of many float8 rows for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import sys

import triton.language as tl
from compile_hopper import code_of, compiled_kernel, count_spills, descriptor, figures_of

from octavo.gemm.hopper.float8.many_tiling import HALF_ROWS, STEP, fill_tiling
from octavo.gemm.hopper.float8.persistent_epilogue import Result, Shape
from octavo.gemm.hopper.float8.persistent_kernel import persistent_float8_kernel

# Columns, extra, activation, bias, residual, whether scales are of tiles.
CASES = {
    "gate and up": (64, 32, "silu", None, False, False),
    "gate and up, exact gelu": (64, 32, "gelu", None, False, False),
    "gate and up, bias": (64, 32, "silu", "*bf16", False, False),
    "two parts": (128, 64, None, None, False, False),
    "residual, bias": (128, 0, None, "*bf16", True, False),
    "tiles, gate and up": (64, 0, "silu", None, False, True),
    "tiles, residual": (128, 0, None, None, True, True),
}


def compile_case(columns, extra, activation, bias, adds, tiled):
    """Facts, and how many instructions read or write what does not fit into registers."""
    halves = 1 if activation is None else 2
    tiling = fill_tiling(columns, extra, halves, span=1 if tiled else 4)
    parts = (columns, extra or columns)
    shape = (halves, columns, extra, tiling.stages, tiling.span, tiled, tiling.group, activation, adds)
    arguments = [
        descriptor("fp8e4nv", 1, [HALF_ROWS, STEP]),
        *(descriptor("fp8e4nv", 1, [halves, part, STEP]) for part in parts),
        *(descriptor("bf16", 2, [HALF_ROWS, part], min(128, 2 * part)) for part in parts),
        Result("*bf16", "i32", "*fp32", "*fp32", bias),
        *("i32", "i32", "i32"),
        Shape(*map(tl.constexpr, shape)),
    ]
    compiled = compiled_kernel(persistent_float8_kernel, arguments, num_warps=4, maxnreg=168, launch_pdl=True)
    return figures_of(compiled) | {"spills": count_spills(code_of(compiled))}


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
