"""Compiles GEMMs of experts in 4 bits for a Hopper GPU, without one; prints facts about them as JSON.

Their bfloat16 path is PTX, which Triton's interpreter has not. A process of its own: where the interpreter is
switched on, its compiler is not to be had.
"""

import json
import re
import sys

import torch
import triton.language as tl
from compile_hopper import compiled_kernel, figures_of, inspect_cubin
from triton.compiler import ASTSource

from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.tiling import MXFP4_FEW_TILING, Mxfp4Tiling, choose_grouped_tiling
from octavo.layers.moe.triton.mxfp4_gemm import _mxfp4_kernel
from octavo.layers.moe.triton.packed_grouped import _packed_kernel

SIZE = 2880


def facts_of(kernel, arguments, **options):
    """Figures, and how many instructions move halves or bytes of registers."""
    values = [arguments.pop(name) for name in kernel.arg_names]
    assert not arguments, f"no arguments of {kernel}: {arguments}"
    compiled = compiled_kernel(kernel, values, ASTSource, **options)
    code = inspect_cubin(compiled, "nvdisasm", "-c")
    return figures_of(compiled) | {"moves": len(re.findall(r"\bPRMT\b", code))}


def compile_mxfp4(tiling: Mxfp4Tiling, *, few: bool = False):
    tensors = {
        name + "_ptr": "*bf16" if name in ("x", "bias", "out") else "*i32"
        for name in ("x", "words", "exponents", "bias", "out", "pairs", "starts")
    }
    if few:
        tensors["pairs_ptr"] = None
    sizes = dict.fromkeys(("num_columns", "stride_x", "num_slots"), "i32")
    tile = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "PARTS": tiling.parts,
        "STAGES": tiling.num_stages,
    }
    form = {"NUM_CHOSEN": 4, "SIZE": SIZE, "ACTIVATION": tl.constexpr("clamped_swiglu"), "OVERLAP": True}
    return facts_of(_mxfp4_kernel, {**tensors, **sizes, **tile, **form}, num_warps=tiling.num_warps)


def compile_packed():
    kinds = {"x": "*bf16", "out": "*bf16", "factors": "*fp32"}
    names = ("x", "words", "pairs", "factors", "order", "out", "rows", "starts")
    tensors = {name + "_ptr": kinds.get(name, "*i32") for name in names}
    sizes = dict.fromkeys(("num_columns", "stride_x", "num_slots"), "i32")
    tile = {"ROWS": 16, "COLUMNS": 64, "BITS": 4, "GROUP": 128, "ORDERED": False}
    form = {"NUM_CHOSEN": 8, "SIZE": 2048, "ACTIVATION": tl.constexpr("silu"), "OVERLAP": True}
    return facts_of(_packed_kernel, {**tensors, **sizes, **tile, **form}, num_warps=4, num_stages=3)


def main() -> None:
    words = torch.empty(32, 23, 5760, 16, dtype=torch.int32, device="meta")
    weight = Mxfp4ExpertWeight(SIZE, words, words[..., 0])
    found = {"few": compile_mxfp4(MXFP4_FEW_TILING, few=True), "packed": compile_packed()}
    for rows in (2, 8, 32):
        tiling = choose_grouped_tiling(rows, weight, is_gated=True, deterministic=False)
        assert isinstance(tiling, Mxfp4Tiling)
        found[f"{rows} rows"] = compile_mxfp4(tiling)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
