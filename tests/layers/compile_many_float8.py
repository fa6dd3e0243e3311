"""Compiles the GEMM of many float8 rows for a Hopper GPU, without one; prints facts about it as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import triton.language as tl
from compile_hopper import compiled_kernel, figures_of, inspect_cubin
from triton.experimental.gluon import language as gl

from octavo.layers.linear.float8.many.kernel import many_kernel
from octavo.layers.linear.float8.many.tiles import HALF_ROWS, STEP, Result, Shape
from octavo.layers.linear.float8.many.tiling import fill_tiling

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


def describe(box: list[int], kind: str = "fp8e4nv", itemsize: int = 1) -> str:
    """The type of a tensor descriptor."""
    swizzle = min(128, itemsize * box[-1])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=len(box))
    return f"tensordesc<{kind}{box},{layout!r}>"


def compile_case(columns, extra, activation, bias, adds, tiled):
    """Facts, and how many instructions read or write what does not fit into registers."""
    halves = 1 if activation is None else 2
    tiling = fill_tiling(columns, extra, halves, span=1 if tiled else 4)
    parts = (columns, extra or columns)
    shape = (halves, columns, extra, tiling.stages, tiling.span, tiled, tiling.group, activation, adds)
    arguments = [
        describe([HALF_ROWS, STEP]),
        *(describe([halves, part, STEP]) for part in parts),
        *(describe([HALF_ROWS, part], "bf16", 2) for part in parts),
        Result("*bf16", "i32", "*fp32", "*fp32", bias),
        *("i32", "i32", "i32"),
        Shape(*map(tl.constexpr, shape)),
    ]
    compiled = compiled_kernel(many_kernel, arguments, num_warps=4, maxnreg=168, launch_pdl=True)
    spills = re.findall(r"\b(?:LDL|STL)\b", inspect_cubin(compiled, "nvdisasm", "-c"))
    return figures_of(compiled) | {"spills": len(spills)}


def main() -> None:
    json.dump({name: compile_case(*case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
