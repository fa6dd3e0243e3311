"""Compiles portable products for one generation of GPUs, without one; prints figures as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import sys

import torch
from compile_experts import choice, integers, mxfp4_weight, packed_weight
from compile_hopper import figures_of
from compiled_launches import compiled_by, empty

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.packed import PackedWeight
from octavo.gemm.portable.experts.route_token import norm_and_route
from octavo.gemm.portable.experts.router_logits import router_logits
from octavo.gemm.portable.invariant import invariant_linear
from octavo.gemm.portable.packed.dequantise import dequantise
from octavo.gemm.portable.packed.medium import medium_linear
from octavo.gemm.portable.packed.rows_gemm import few_linear
from octavo.gemm.portable.skinny import skinny_linear
from octavo.gemm.stacked_experts import StackedExperts


def dense(rows: int, size: int = 2048) -> PackedWeight:
    """A weight in 4 bits."""
    words, pairs = integers(rows, size // 8), integers(size // 128, rows)
    return PackedWeight(4, size, 128, words, pairs, 1.0, None, integers(64))


def floats(rows: int, size: int = 2048) -> ExpertWeight:
    return ExpertWeight(empty(8, rows, size))


def calls():
    """Name -> a call whose launches are compiled."""
    experts = {
        "floats": StackedExperts(floats(2 * 128), ExpertWeight(empty(8, 2048, 128)), "silu"),
        "mxfp4": StackedExperts(mxfp4_weight(8), mxfp4_weight(8), "clamped_swiglu"),
        "packed": StackedExperts(packed_weight(8), packed_weight(8), "silu"),
    }
    for form, stacked in experts.items():
        size = stacked.gate_up.shape[2]
        yield f"{form}, one token", lambda s=stacked, n=size: s.few(empty(1, n), choice())
        yield f"{form}, grouped", lambda s=stacked, n=size: s.grouped(empty(16, n), many_choices())
    yield "skinny", lambda: skinny_linear(empty(1, 1024), empty(4096, 1024), residual=empty(1, 4096))
    yield "invariant", lambda: invariant_linear(empty(1, 1024), empty(4096, 1024))
    yield "4 bits, rows", lambda: few_linear(empty(8, 2048), dense(4096))
    yield "4 bits, medium", lambda: medium_linear(empty(64, 2048), dense(4096))
    yield "4 bits, dequantised", lambda: dequantise(dense(4096), empty(1))
    yield "router", lambda: router_logits(empty(64, 2048), empty(128, 2048))
    route = {"renormalises": True, "bias": None, "held": None, "slots": None, "arrivals": integers(8)}
    yield "route", lambda: norm_and_route(empty(1, 2048), empty(2048), 1e-6, empty(128, 2048), 8, **route)


def many_choices():
    return choice()._replace(experts=integers(16, 2), weights=empty(16, 2, dtype=torch.float32))


def main() -> None:
    found = {
        f"{name}, kernel {number}": figures_of(compiled)
        for name, call in calls()
        for number, compiled in enumerate(compiled_by(call))
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
