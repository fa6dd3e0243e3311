"""Products with weights in 4 and 8 bits on one GPU, beside bfloat16: those of a decoder layer.

    python benchmarks/gpu_int4.py [--models 8b] [--rows 1 2 4 ...] [--kinds bf16 int4] [--save MACHINE]
    python benchmarks/gpu_int4.py --sweep [--models ...] [--rows ...]
    python benchmarks/gpu_int4.py --engine [--models 8b 30b-a3b] [--peer vllm]

A CUDA graph makes one call per copy of the weights, and its time is divided by the number of copies. The
copies together are several times the L2 cache, so that weights come from memory, as in a decoder. The bound
is what is read and written once, over 4.8 TB/s, an H200's memory rate. Prints a table, then one line of JSON.
--sweep times other tilings of int4 products and prints the fastest few. --engine generates by an engine whose
projections and experts have random int4 weights: one request, and many, beside the bound at the measured
rates (support/gpu_bound.py).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from gpu_linear import MODELS, Shape, microseconds, random_numbers
from gpu_moe import BYTES, random_packed
from peers.vllm_serving import measure_in_child
from support.common import make_parser, publish, table
from support.gpu_bound import bound_s
from support.gpu_model import free_memory, load, run
from support.gpu_timing import copy_bandwidth, matrix_flops
from support.gpu_workloads import WORKLOADS, run_figures
from torch import Tensor

from octavo.forms.base import QuantisedWeight
from octavo.forms.blocks import BlockWeight
from octavo.forms.packed import GroupedWeight
from octavo.gemm.plain import Linear, PlainLinear
from octavo.gemm.portable.packed.packed_tiling import FEW_MAX_ROWS, FewTiling, MediumTiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.gemm.table import make_quantised_linear
from octavo.layers import RMSNorm
from octavo.layers.block import make_input, make_output
from octavo.models.experts.loading import ExpertShape
from octavo.parallel import TensorParallel

BYTES_PER_SECOND = 4.8e12
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
# Bytes of weights in one graph: several times an L2 cache of 60 MB.
_ROTATED_BYTES = 400e6
_MAX_COPIES = 56
_EPS = 1e-6
# Rows of a weight that is an LM head's.
_VOCABULARY = 65536
# What tells vLLM to make weights of the same size.
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
}  # fmt: skip
# Processes that compile kernels side by side, and rows of the weights they do it with.
_COMPILERS = 14
_FEW_WEIGHT_ROWS = 256


def random_blocks(num_rows: int, size: int, bits: int, group: int, *, mins: bool) -> BlockWeight:
    """Return a weight in blocks on the GPU."""
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    quants = torch.randint(low, high, (num_rows, size), dtype=dtype, device="cuda")
    scales = torch.rand(num_rows, size // group, dtype=torch.float16, device="cuda") * 0.002
    return BlockWeight(bits, quants, scales, -8 * scales if mins else None)


def block_layer(bits: int, group: int, mins: bool, num_rows: int, size: int) -> Linear:
    """Return a layer that multiplies blocks."""
    weights: list[QuantisedWeight] = [random_blocks(num_rows, size, bits, group, mins=mins)]
    return make_quantised_linear(weights, dtype=torch.bfloat16)


def plain_layer(num_rows: int, size: int) -> Linear:
    """Return the layer of an unquantised weight."""
    return PlainLinear(random_numbers(num_rows, size), None)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of weights.

    Attributes:
        make: (N, K) -> a layer with a random weight.
        bytes_per_number: of the weight, scales included.
    """

    make: Callable[[int, int], Linear]
    bytes_per_number: float


KINDS: Mapping[str, Kind] = {
    "bf16": Kind(plain_layer, 2),
    "int4": Kind(partial(block_layer, 4, 128, True), 0.5 + 4 / 128),
    "int4-32": Kind(partial(block_layer, 4, 32, True), 0.5 + 4 / 32),
    "int8-32": Kind(partial(block_layer, 8, 32, False), 1 + 4 / 32),
    "int8-16": Kind(partial(block_layer, 8, 16, False), 1 + 4 / 16),
}


def bound_us(shape: Shape, kind: Kind, num_rows: int) -> float:
    """Microseconds to read weights and rows and to write results once."""
    weight_bytes = shape.num_weight_rows * shape.size * kind.bytes_per_number
    row_bytes = 2 * (shape.size + shape.num_columns * (2 if shape.adds else 1))
    return (weight_bytes + num_rows * row_bytes) / BYTES_PER_SECOND * 1e6


def time_of(shape: Shape, kind: Kind, num_rows: int) -> float:
    """Microseconds of a product with all that a decoder layer fuses with it."""
    copies = max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / (bound_us(shape, kind, 0) * 4.8e6))))
    layers = [kind.make(shape.num_weight_rows, shape.size) for _ in range(copies)]
    x = random_numbers(num_rows, shape.size)
    if shape.adds:
        outputs = [make_output(layer, None, TensorParallel()) for layer in layers]
        stream = random_numbers(num_rows, shape.num_columns)

        def into(index: int) -> None:
            delta = outputs[index](x, stream)
            if delta is not None:
                stream.add_(delta)

        return microseconds(into, list(range(copies)))
    norm = RMSNorm(random_numbers(shape.size), _EPS)
    inputs = [make_input(norm, layer, shape.activation) for layer in layers]
    return microseconds(lambda index: inputs[index](x, None), list(range(copies)))


def compile_one(shape: Shape, kind: str, num_rows: int) -> None:
    """Compile what a shape needs into Triton's cache, by a weight of few rows."""
    time_of(replace(shape, num_weight_rows=_FEW_WEIGHT_ROWS), KINDS[kind], num_rows)


def compile_all(models: list[str], all_rows: list[int], kinds: list[str]) -> None:
    """Compile side by side what is timed one after the other."""
    shapes = [shape for model in models for shape in MODELS[model] if shape.name != "lm_head"]
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        for job in [pool.submit(compile_one, *case) for case in product(shapes, kinds, all_rows)]:
            job.result()


def compare(model: str, num_rows: int, kinds: list[str]) -> list[dict[str, object]]:
    """Time all kinds at a model's shapes, and their sum."""
    results: list[dict[str, object]] = []
    totals = dict.fromkeys(kinds, (0.0, 0.0))
    for shape in MODELS[model]:
        if shape.name == "lm_head":
            continue
        for name in kinds:
            bound, us = bound_us(shape, KINDS[name], num_rows), time_of(shape, KINDS[name], num_rows)
            totals[name] = totals[name][0] + bound, totals[name][1] + us
            results.append(entry(model, shape.name, num_rows, name, bound, us))
    return results + [entry(model, "layer", num_rows, name, *total) for name, total in totals.items()]


def entry(model: str, shape: str, num_rows: int, kind: str, bound: float, us: float) -> dict[str, object]:
    """Return one line of the table."""
    return {
        "model": model,
        "rows": num_rows,
        "shape": shape,
        "kind": kind,
        "bound_us": round(bound, 2),
        "us": round(us, 2),
        "of_bound": round(bound / us, 3),
    }


def tilings(num_rows: int) -> list[FewTiling | MediumTiling]:
    """Return tilings to be compared."""
    if num_rows <= FEW_MAX_ROWS:
        sizes = [(16, 8, 3), (16, 8, 5), (16, 4, 6), (32, 8, 3), (32, 4, 3)]
        # Of a single row, K is not cut; it is kept in registers or not.
        ways = [(1, False), (1, True)] if num_rows == 1 else [(1, False), (2, False), (3, False), (6, False)]
        return [FewTiling(*size, programs, *way) for size in sizes for programs in (1, 2) for way in ways]
    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))
    forms = [(64, 4, 2, 1), (64, 4, 2, 2), (64, 4, 2, 4), (64, 4, 2, 8), (64, 4, 3, 2)]
    forms += [(128, 8, 2, 1), (128, 8, 2, 2), (128, 8, 2, 4), (128, 4, 2, 2)]
    return [MediumTiling(rows, *form) for form in forms]


def call(
    x: Tensor, residual: Tensor | None, norm: Tensor | None, shape: Shape, tiling: FewTiling | MediumTiling
) -> Callable[[GroupedWeight], Tensor]:
    """Return the product of x by a tiling, with what is fused."""
    if isinstance(tiling, FewTiling):
        from octavo.gemm.portable.packed.rows_gemm import few_linear

        return lambda weight: few_linear(
            x, weight, norm_weight=norm, activation=shape.activation, residual=residual, tiling=tiling
        )
    from octavo.gemm.portable.packed.medium import medium_linear

    return lambda weight: medium_linear(
        x, weight, activation=shape.activation, residual=residual, tiling=tiling
    )


def time_tilings(shape: Shape, num_rows: int, *, compiles_only: bool = False) -> dict[str, float]:
    """Return microseconds by tiling; those that do not fit are missing."""
    if compiles_only:
        shape = replace(shape, num_weight_rows=_FEW_WEIGHT_ROWS)
    nbytes = bound_us(shape, KINDS["int4"], 0) * 4.8e6
    copies = 1 if compiles_only else max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / nbytes)))
    weights = [
        GroupedWeight.pack(random_blocks(shape.num_weight_rows, shape.size, 4, 128, mins=True))
        for _ in range(copies)
    ]
    x = random_numbers(num_rows, shape.size)
    residual = random_numbers(num_rows, shape.num_columns) if shape.adds else None
    times: dict[str, float] = {}
    for tiling in tilings(num_rows):
        norms = [random_numbers(shape.size)] if shape.has_norm and num_rows == 1 else [None]
        for norm in norms:
            run = call(x, residual, norm, shape, tiling)
            name = f"{type(tiling).__name__}{astuple(tiling)}{' norm' if norm is not None else ''}"
            try:
                run(weights[0])
                times[name] = 0.0 if compiles_only else microseconds(run, weights, 5)
            except Exception as error:
                # Too much shared memory, or too many registers.
                print(f"{shape.name} {name}: {type(error).__name__} {str(error)[:100]}")
    return times


def sweep(models: list[str], all_rows: list[int]) -> list[dict[str, object]]:
    """Compile everything in parallel, then time it alone on the GPU, and print the best."""
    shapes = [(m, shape) for m in models for shape in MODELS[m] if shape.name != "lm_head"]
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(time_tilings, shape, rows, compiles_only=True)
            for (_, shape), rows in product(shapes, all_rows)
        ]
        for job in jobs:
            job.result()
    results: list[dict[str, object]] = []
    for (model, shape), rows in product(shapes, all_rows):
        times = time_tilings(shape, rows)
        best = sorted(times.items(), key=lambda item: item[1])[:5]
        print(f"{model} {shape.name} rows {rows}: bound {bound_us(shape, KINDS['int4'], rows):.2f} us")
        for name, us in best:
            print(f"    {us:7.2f}  {name}")
        results.append({"model": model, "shape": shape.name, "rows": rows, "us": dict(best)})
    return results


def packed_layer(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """Return a layer of random int4 weights in the place of a projection's; the LM head stays as it is."""
    if weight.shape[0] > _VOCABULARY:
        return PlainLinear(weight, bias)
    num_rows, size = weight.shape
    weights: list[QuantisedWeight] = [random_blocks(num_rows, size, 4, 128, mins=True)]
    return make_quantised_linear(weights, bias, dtype=weight.dtype)


def packed_experts(
    checkpoint: object, names: Sequence[str], part: object, shape: ExpertShape, **options: Any
) -> StackedExperts:
    """Return random int4 experts in the place of a layer's."""
    gate_up = random_packed(len(names), 2 * shape.size, shape.hidden, 2)
    return StackedExperts(gate_up, random_packed(len(names), shape.hidden, shape.size, 1), **options)


def serve(model: str, peer: str, bandwidth: float, flops: float) -> list[dict[str, object]]:
    """Generate by an engine with random int4 weights, and print tokens per second."""
    names = ["single", "mid"]
    vllm = None
    if peer == "vllm":
        settings = {"model": model, "fields": {"quantization_config": GPTQ}, "workloads": names, "runs": 2}
        vllm = measure_in_child("offline", settings, limit_s=300)
    with (
        patch("octavo.models.builder.make_linear", packed_layer),
        patch("octavo.models.builder.read_stacked", packed_experts),
    ):
        llm = load(model)
    results: list[dict[str, object]] = []
    for name in names:
        workload = WORKLOADS[name]()
        figures = run_figures(workload, [run(llm, workload) for _ in range(2)])
        bound = bound_s(model, workload, bandwidth, flops, 2, BYTES["packed"])
        rate, first, share = figures["rate"], figures["first_rate"], bound / min(figures["seconds"])
        print(
            f"{model} {name}: best {rate:,.1f} (first {first:,.1f}) {workload.unit}, {share:.0%} of the bound"
        )
        # With what vLLM made of the quantization_config.
        beside = None if vllm is None else {"weights": vllm["weights"], **vllm["results"][name]}
        results.append({"model": model, "workload": name, **figures, "bound_s": bound, "vllm": beside})
    del llm
    free_memory()
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=[*MODELS, "30b-a3b"], nargs="+", default=["8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=["bf16", "int4"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--peer", choices=["none", "vllm"], default="none", help="beside --engine")
    arguments = parser.parse_args()
    if not arguments.engine and not set(arguments.models) <= set(MODELS):
        parser.error("models with experts are for --engine; gpu_moe.py --form packed times their layers")
    found: dict[str, object] = {}
    if arguments.sweep:
        results = sweep(arguments.models, arguments.rows)
    elif arguments.engine:
        rates = copy_bandwidth(), matrix_flops()
        found = {"copy_bytes_per_s": rates[0], "matrix_flops": rates[1]}
        free_memory()
        results = [result for model in arguments.models for result in serve(model, arguments.peer, *rates)]
    else:
        compile_all(arguments.models, arguments.rows, arguments.kinds)
        results = [
            result
            for model in arguments.models
            for num_rows in arguments.rows
            for result in compare(model, num_rows, arguments.kinds)
        ]
        print(table(list(results[0]), [list(result.values()) for result in results]))
    publish("gpu_int4-engine" if arguments.engine else "gpu_int4", {**found, "results": results}, arguments)


if __name__ == "__main__":
    main()
