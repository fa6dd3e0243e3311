"""Compiles GEMMs of experts for a Hopper GPU, without one; prints facts about them as JSON.

The bfloat16 path of 4 bits is PTX, which Triton's interpreter has not. A process of its own: where the
interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import torch
import triton.language as tl
from compile_hopper import code_of, compiled_kernel, figures_of
from triton.compiler import ASTSource

from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.portable.experts.combine import _combine_kernel
from octavo.gemm.portable.experts.expert_tiling import (
    FEW_TILING,
    MXFP4_FEW_TILING,
    Mxfp4Tiling,
    PackedTiling,
    mxfp4_grouped_tiling,
    packed_pair_tiling,
)
from octavo.gemm.portable.experts.mxfp4_gemm import _mxfp4_kernel
from octavo.gemm.portable.experts.packed_grouped import _packed_kernel
from octavo.gemm.portable.experts.packed_pairs import _packed_few_kernel
from octavo.gemm.portable.experts.pairs import _few_down_kernel, _few_gate_up_kernel
from octavo.gemm.portable.experts.router_logits import _choose_kernel

SIZE = 2880


def facts_of(kernel, arguments, **options):
    """Figures, and how many instructions move halves or bytes of registers."""
    values = [arguments.pop(name) for name in kernel.arg_names]
    assert not arguments, f"no arguments of {kernel}: {arguments}"
    compiled = compiled_kernel(kernel, values, ASTSource, **options)
    code = code_of(compiled)
    return figures_of(compiled) | {"moves": len(re.findall(r"\bPRMT\b", code))}


def compile_mxfp4(tiling: Mxfp4Tiling, *, few: bool = False, num_held: int = 32):
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
    form = {"NUM_CHOSEN": 4, "SIZE": SIZE, "ACTIVATION": tl.constexpr("clamped_swiglu")}
    form |= {"NUM_HELD": num_held, "OVERLAP": True}
    return facts_of(_mxfp4_kernel, {**tensors, **sizes, **tile, **form}, num_warps=tiling.num_warps)


def compile_few(num_held: int):
    """Plain experts with biases, of one to four tokens."""
    floats = {f"{name}_ptr": "*bf16" for name in ("x", "weight", "bias", "out")}
    tensors = {**floats, "scales_ptr": "*fp32", "experts_ptr": "*i32"}
    tile = {"COLUMNS": FEW_TILING.columns, "DEPTH": FEW_TILING.depth}
    form = {"WIDTH": 0, "NUM_CHOSEN": 8, "SIZE": 2048, "NUM_HELD": num_held, "OVERLAP": True, **tile}
    up = {"num_weight_rows": "i32", "stride_x": "i32", "ACTIVATION": tl.constexpr("silu")}
    down = {"weights_ptr": "*fp32", "num_columns": "i32", "stride_out": "i32", "ADD": False}
    options = {"num_warps": FEW_TILING.num_warps}
    return [
        facts_of(_few_gate_up_kernel, {**tensors, **form, **up}, **options),
        facts_of(_few_down_kernel, {**tensors, **form, **down}, **options),
    ]


def compile_around(num_held: int):
    """The choice before, and the sum after."""
    tensors = {"experts_ptr": "*i32", "weights_ptr": "*fp32"}
    form = {"NUM_CHOSEN": 8, "NUM_HELD": num_held, "OVERLAP": True}
    choose = {"logits_ptr": "*fp32", "bias_ptr": "*bf16", "slots_ptr": "*i32", "first_held": "i32"}
    choose["CHOSEN"] = 8
    choose |= {"NUM_EXPERTS": 128, "EXPERTS": 128, "RENORMALISES": True}
    combine = {"rows_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "stride_out": "i32"}
    combine |= {"BLOCK": 1024, "ADD": False}
    return [
        facts_of(_choose_kernel, {**tensors, **form, **choose}, num_warps=1),
        facts_of(_combine_kernel, {**tensors, **form, **combine}, num_warps=4),
    ]


def compile_packed():
    kinds = {"x": "*bf16", "out": "*bf16", "factors": "*fp32"}
    names = ("x", "words", "pairs", "factors", "order", "out", "rows", "starts")
    tensors = {name + "_ptr": kinds.get(name, "*i32") for name in names}
    sizes = dict.fromkeys(("num_columns", "stride_x", "num_slots"), "i32")
    tile = {"ROWS": 16, "COLUMNS": 128, "BITS": 4, "GROUP": 128, "ORDERED": False}
    form = {"NUM_CHOSEN": 8, "SIZE": 2048, "ACTIVATION": tl.constexpr("silu"), "OVERLAP": True}
    return facts_of(_packed_kernel, {**tensors, **sizes, **tile, **form}, num_warps=4, num_stages=3)


def compile_packed_few(num_held: int = 128):
    kinds = {"x": "*bf16", "out": "*bf16", "factors": "*fp32"}
    names = ("x", "words", "pairs", "factors", "order", "out", "experts")
    tensors = {name + "_ptr": kinds.get(name, "*i32") for name in names}
    sizes = dict.fromkeys(("num_columns", "stride_x", "num_chosen"), "i32")
    words = torch.empty(128, 1536, 256, dtype=torch.int32, device="meta")
    tiling = packed_pair_tiling(PackedExpertWeight(4, 2048, 128, words, words, words))
    assert isinstance(tiling, PackedTiling)
    tile = {
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "PARTS": tiling.parts,
        "STAGES": tiling.num_stages,
    }
    form = {"SIZE": 2048, "BITS": 4, "GROUP": 128, "ORDERED": False, "ACTIVATION": tl.constexpr("silu")}
    form |= {"NUM_HELD": num_held, "OVERLAP": True}
    return facts_of(_packed_few_kernel, {**tensors, **sizes, **tile, **form}, num_warps=tiling.num_warps)


def main() -> None:
    words = torch.empty(32, 23, 5760, 16, dtype=torch.int32, device="meta")
    weight = Mxfp4ExpertWeight(SIZE, words, words[..., 0])
    found = {"few": compile_mxfp4(MXFP4_FEW_TILING, few=True), "packed": compile_packed()}
    found["few, packed"] = compile_packed_few()
    for rows in (2, 8, 32):
        tiling = mxfp4_grouped_tiling(weight, rows, is_gated=True)
        assert isinstance(tiling, Mxfp4Tiling)
        found[f"{rows} rows"] = compile_mxfp4(tiling)
    held = [compile_mxfp4(MXFP4_FEW_TILING, few=True, num_held=8), *compile_few(8), *compile_around(8)]
    held.append(compile_packed_few(8))
    json.dump({"4 bits": found, "some experts elsewhere": held}, sys.stdout)


if __name__ == "__main__":
    main()
