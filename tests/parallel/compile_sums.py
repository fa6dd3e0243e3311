"""Compiles the kernels that sum over ranks for a Hopper GPU, without one.

Prints, as JSON, each kernel's registers, spilled bytes, and how it reads, writes and meets.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.rms_norm import tile_of
from octavo.parallel.triton.sum_norm import _sum_rms_norm_kernel
from octavo.parallel.triton.sums import _NUM_WARPS, _TILE, _one_shot_kernel, _two_shot_kernel

HIDDEN = 4096
# Of any value, not a multiple of 16.
ODD = ("rank", "num_rows", "eps")


def compile_kernel(kernel, types, num_warps):
    """What a kernel compiles to; types by name, or constants."""
    signature, constants, facts = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if isinstance(types[name], str):
            signature[name] = types[name]
            if name not in ODD:
                facts[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(i,)] = types[name]
    source = ASTSource(kernel, signature, constants, facts)
    options = {"num_warps": num_warps, "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if len(sys.argv) > 1:
        Path(sys.argv[1], f"{kernel.__name__}{types['WORLD']}.ptx").write_text(compiled.asm["ptx"])
    return figures(compiled)


def figures(compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [tool, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+).*?STACK:(\d+)", usage.stdout + usage.stderr).groups()
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "meetings": ptx.count("st.release.sys"),
        "narrow": len(re.findall(r"(?:ld|st)\.global(?:\.cg)?\.b16", ptx)),
        "wide": len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.v4\.b32", ptx)),
    }


def compile_sums(dtype, world):
    """One shot, two shots, and one shot with a norm."""
    shared = {"table": "*i64", "count_ptr": "*i32", "rank": "i32", "WORLD": world, "OVERLAP": True}
    flat = {"x_ptr": f"*{dtype}", "num_values": "i32", "part": "i32", "TILE": _TILE, **shared}
    rows = dict.fromkeys(("part_ptr", "residual_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    rows |= dict.fromkeys(("stride_part", "stride_residual", "num_rows", "size"), "i32")
    block, num_warps = tile_of(HIDDEN)
    return {
        "one-shot": compile_kernel(_one_shot_kernel, flat, _NUM_WARPS),
        "two-shot": compile_kernel(_two_shot_kernel, flat, _NUM_WARPS),
        "norm": compile_kernel(
            _sum_rms_norm_kernel, {**rows, "eps": "fp32", "BLOCK": block, **shared}, num_warps
        ),
    }


def main() -> None:
    found = {}
    for dtype, world in (("bf16", 2), ("bf16", 8), ("fp16", 4), ("fp32", 3)):
        for name, used in compile_sums(dtype, world).items():
            found[f"{name} {dtype} {world}"] = used
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
