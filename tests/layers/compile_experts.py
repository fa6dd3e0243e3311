"""Compiles GEMMs of experts for a Hopper GPU, without one; prints facts about them as JSON.

The bfloat16 path of 4 bits is PTX, which Triton's interpreter has not. A process of its own: where the
interpreter is switched on, its compiler is not to be had.
"""

import json
import re
import sys

import torch
from compile_hopper import code_of, figures_of
from compiled_launches import compiled_by, empty

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, num_spans
from octavo.forms.packed import span_columns
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts import grouped_gemm, pair_gemv
from octavo.gemm.portable.experts.combine import combine_rows
from octavo.gemm.portable.experts.router_logits import route_experts
from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.gemm.table import EXPERTS

SIZE = 2880


def facts_of(call):
    """Figures of the only kernel of a call, and how many instructions move halves or bytes of registers."""
    (compiled,) = compiled_by(call)
    code = code_of(compiled)
    return figures_of(compiled) | {"moves": len(re.findall(r"\bPRMT\b", code))}


def integers(*shape: int):
    return empty(*shape, dtype=torch.int32)


def mxfp4_weight(number: int = 32):
    words, exponents = integers(number, num_spans(SIZE), 128, 16), integers(number, num_spans(SIZE), 128)
    return Mxfp4ExpertWeight(SIZE, words, exponents, empty(number, 128))


def packed_weight(number: int = 128, size: int = 2048):
    group = 128
    spans = -(-size // span_columns(4))
    pairs = integers(number, spans * span_columns(4) // group, 128)
    factors = empty(number, 2, dtype=torch.float32)
    return PackedExpertWeight(4, size, group, integers(number, 128, spans * 32), pairs, factors)


def tiling_of(product: str, weight, *options, **more):
    """Return the tiling of a product that the table has for a form of experts."""
    (row,) = [row for row in EXPERTS[weight.kind] if row.name == product]
    return row.tiling(weight, *options, **more)


def compile_few(weight, num_chosen: int, activation: str):
    """Gate and up of a token, by programs for each pair."""
    kernels = pair_gemv if isinstance(weight, ExpertWeight) else grouped_gemm
    x, experts, tiling = empty(1, weight.shape[2]), integers(1, num_chosen), tiling_of("few", weight)
    return facts_of(lambda: kernels.pair_gate_up(x, weight, experts, activation, tiling))


def compile_grouped(weight, rows_per_expert: float, num_chosen: int, activation: str):
    tiling = tiling_of("grouped", weight, rows_per_expert, is_gated=True)
    by_expert = SortedPairs(integers(64 * num_chosen), integers(weight.shape[0] + 1), num_chosen, 2)
    x = empty(64, weight.shape[2])
    return facts_of(lambda: grouped_gemm.grouped_gemm(x, weight, by_expert, activation, tiling))


def choice(num_chosen: int = 8):
    return Choice(integers(1, num_chosen), empty(1, num_chosen, dtype=torch.float32))


def compile_around(num_held: int):
    """The choice before, and the sum after."""
    logits, bias, slots = empty(1, 128, dtype=torch.float32), empty(128), integers(1)
    held = range(num_held)
    options = {"renormalises": True, "bias": bias, "held": held, "slots": slots}
    return [
        facts_of(lambda: route_experts(logits, 8, **options)),
        facts_of(lambda: combine_rows(empty(8, 2048), choice(), num_held=num_held)),
    ]


def compile_held(num_held: int):
    """Products of 1 to 4 tokens where other ranks have some of the experts."""
    weight = ExpertWeight(empty(num_held, 128, 2048), bias=empty(num_held, 128))
    down = (empty(8, 2048), weight, choice(), None, tiling_of("few", weight))
    return [
        compile_few(mxfp4_weight(num_held), 4, "clamped_swiglu"),
        compile_few(weight, 8, "silu"),
        facts_of(lambda: pair_gemv.pair_down(*down)),
        *compile_around(num_held),
        compile_few(packed_weight(num_held), 8, "silu"),
    ]


def main() -> None:
    mxfp4, packed = mxfp4_weight(), packed_weight()
    found = {f"{rows} rows": compile_grouped(mxfp4, rows, 4, "clamped_swiglu") for rows in (2, 8, 32)}
    found["few"] = compile_few(mxfp4, 4, "clamped_swiglu")
    found["packed"] = compile_grouped(packed, 2, 8, "silu")
    found["few, packed"] = compile_few(packed, 8, "silu")
    json.dump({"4 bits": found, "some experts elsewhere": compile_held(8)}, sys.stdout)


if __name__ == "__main__":
    main()
