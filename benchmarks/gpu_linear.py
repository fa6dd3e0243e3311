"""Skinny GEMMs (1 to 4 rows) on one GPU, beside cuBLAS with separate norm and activation kernels.

    python benchmarks/gpu_linear.py [--models 0.6b 8b] [--rows 1 2 4] [--save MACHINE]
    python benchmarks/gpu_linear.py --sweep [--models ...] [--rows ...]

A CUDA graph makes one call per copy of the weights, and its time is divided by the number of copies. The
copies together are several times the L2 cache, so that weights come from memory, as in a decoder. The bound
is bytes over 4.28 TB/s, an H200's copy rate. Prints a table, then one line of JSON. --sweep times other
tilings and prints the fastest few, and Octavo's own tiling with and without overlapping launches.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from support.common import make_parser, publish, table
from torch import Tensor
from torch.nn.functional import linear

from octavo.gemm.portable.skinny import skinny_linear
from octavo.gemm.portable.skinny_tiling import Tiling, choose_tiling
from octavo.kernels import launch as triton_launch
from octavo.kernels.activation import gated_activation
from octavo.kernels.rms_norm import rms_norm

BYTES_PER_SECOND = 4.28e12
# Bytes of weights in one graph: several times an L2 cache of 60 MB.
_ROTATED_BYTES = 400e6
_MAX_COPIES = 28
EPS = 1e-6
# Processes that compile kernels side by side.
_COMPILERS = 14


@dataclass(frozen=True, slots=True)
class Shape:
    """One of a decoder's GEMMs: weight [num_weight_rows, size], and what is fused with it."""

    name: str
    num_weight_rows: int
    size: int
    has_norm: bool = False
    activation: str | None = None
    adds: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of the result."""
        return self.num_weight_rows // (1 if self.activation is None else 2)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_weight_rows * self.size

    def bound_us(self, num_rows: int) -> float:
        """Microseconds to read weights and rows and to write results once."""
        row_bytes = 2 * (self.size + self.num_columns * (2 if self.adds else 1))
        return (self.weight_bytes + num_rows * row_bytes) / BYTES_PER_SECOND * 1e6

    def tiling(self, num_rows: int) -> Tiling:
        """The tiling that Octavo uses."""
        return choose_tiling(num_rows, self.num_weight_rows, self.size, torch.bfloat16)


def decoder_shapes(hidden: int, heads: int, kv_heads: int, inner: int) -> tuple[Shape, ...]:
    """The GEMMs of a Qwen3 decoder with heads of 128."""
    return (
        Shape("qkv", 128 * (heads + 2 * kv_heads), hidden, has_norm=True),
        Shape("o", hidden, 128 * heads, adds=True),
        Shape("gate_up", 2 * inner, hidden, has_norm=True, activation="silu"),
        Shape("down", hidden, inner, adds=True),
        Shape("lm_head", 151936, hidden, has_norm=True),
    )


MODELS = {"0.6b": decoder_shapes(1024, 16, 8, 3072), "8b": decoder_shapes(4096, 32, 8, 12288)}


def separate(
    x: Tensor, weight: Tensor, norm_weight: Tensor | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """cuBLAS, with separate kernels for norm, activation and residual sum."""
    out = linear(x if norm_weight is None else rms_norm(x, norm_weight, EPS), weight)
    if activation is not None:
        out = gated_activation(out, activation)
    return out if residual is None else residual.add_(out)


class Case:
    """A shape's tensors on the GPU, for one number of rows."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        self.shape = shape
        copies = max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / shape.weight_bytes)))
        self.weights = [random_numbers(shape.num_weight_rows, shape.size) for _ in range(copies)]
        self.norm_weight = random_numbers(shape.size) if shape.has_norm else None
        self.x = random_numbers(num_rows, shape.size)
        self.residual = random_numbers(num_rows, shape.num_columns) if shape.adds else None

    def fused(self, weight: Tensor, tiling: Tiling) -> Tensor:
        """Octavo's fused GEMM."""
        return skinny_linear(
            self.x,
            weight,
            norm_weight=self.norm_weight,
            eps=EPS,
            activation=self.shape.activation,
            residual=self.residual,
            tiling=tiling,
        )

    def separate(self, weight: Tensor) -> Tensor:
        """The peer: cuBLAS, with separate kernels for norm and activation."""
        return separate(self.x, weight, self.norm_weight, self.shape.activation, self.residual)

    def microseconds(self, call: Callable[[Tensor], Tensor], num_replays: int = 9) -> float:
        """Median microseconds of a call, over all copies of the weights."""
        return microseconds(call, self.weights, num_replays)


def microseconds(call: Callable[[Any], object], weights: Sequence[Any], num_replays: int = 9) -> float:
    """Median microseconds of a call in a CUDA graph that makes one call for each weight."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(num_replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / len(weights)


def random_numbers(*sizes: int) -> Tensor:
    """Return small bfloat16 numbers on the GPU."""
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02


def compare(model: str, num_rows: int) -> list[dict[str, object]]:
    """Time Octavo's GEMM and the peer at every shape of a model."""
    results: list[dict[str, object]] = []
    for shape in MODELS[model]:
        case = Case(shape, num_rows)
        tiling = shape.tiling(num_rows)
        fused_us = case.microseconds(lambda weight, case=case, tiling=tiling: case.fused(weight, tiling))
        separate_us = case.microseconds(case.separate)
        results.append(
            {
                "model": model,
                "shape": shape.name,
                "rows": num_rows,
                "bound_us": round(shape.bound_us(num_rows), 2),
                "octavo_us": round(fused_us, 2),
                "cublas_us": round(separate_us, 2),
                "of_bound": round(shape.bound_us(num_rows) / fused_us, 3),
                "speedup": round(separate_us / fused_us, 2),
            }
        )
    return results


def candidates(shape: Shape, num_rows: int) -> list[Tiling]:
    """Octavo's tiling and about ten others."""
    sizes = [(2, 2048, 8), (2, 1024, 4), (4, 1024, 4), (4, 512, 2), (8, 1024, 4), (8, 512, 2)]
    sizes += [(4, 512, 4), (4, 1024, 2), (8, 512, 4)] if num_rows <= 2 else [(4, 256, 1), (8, 256, 1)]
    chosen = shape.tiling(num_rows)
    return [chosen, *(tiling for size in sizes if (tiling := Tiling(*size)) != chosen)]


def compile_case(model: str, index: int, num_rows: int) -> None:
    """Compile a shape's candidates into Triton's cache, by one call each."""
    shape = MODELS[model][index]
    case = Case(replace(shape, num_weight_rows=256), num_rows)
    for number, tiling in enumerate(candidates(shape, num_rows)):
        case.fused(case.weights[0], tiling)
        if number == 0:
            with without_overlap():
                case.fused(case.weights[0], tiling)


@contextmanager
def without_overlap() -> Iterator[None]:
    triton_launch.OVERLAP = False
    try:
        yield
    finally:
        triton_launch.OVERLAP = True


def sweep(model: str, index: int, num_rows: int, num_best: int = 4) -> dict[str, object]:
    """Time all candidates at one shape and print the best."""
    shape = MODELS[model][index]
    case = Case(shape, num_rows)

    def time_of(tiling: Tiling) -> float:
        return case.microseconds(lambda weight: case.fused(weight, tiling), 5)

    times = {tiling: time_of(tiling) for tiling in candidates(shape, num_rows)}
    chosen = shape.tiling(num_rows)
    separate_us = case.microseconds(case.separate)
    with without_overlap():
        apart_us = time_of(chosen)
    best = sorted(times.items(), key=lambda item: item[1])[:num_best]
    print(f"{model} {shape.name} rows {num_rows}: bound {shape.bound_us(num_rows):.2f} us, ", end="")
    print(f"cuBLAS {separate_us:.2f}, chosen {times[chosen]:.2f}, without overlap {apart_us:.2f}")
    for tiling, us in best:
        print(f"    {us:6.2f}  Tiling{astuple(tiling)}")
    return {
        "model": model,
        "shape": shape.name,
        "rows": num_rows,
        "cublas_us": round(separate_us, 2),
        "octavo_us": round(times[chosen], 2),
        "without_overlap_us": round(apart_us, 2),
        "best": [{"us": round(us, 2), **asdict(tiling)} for tiling, us in best],
    }


def run_sweep(models: list[str], all_rows: list[int]) -> list[dict[str, object]]:
    """Compile everything in parallel, then time it alone on the GPU."""
    cases = [(m, i, rows) for m in models for i in range(len(MODELS[m])) for rows in all_rows]
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_case, *case) for case in cases]:
            done.result()
    return [sweep(*case) for case in cases]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if arguments.sweep:
        results = run_sweep(arguments.models, arguments.rows)
    else:
        results = [
            result
            for model in arguments.models
            for num_rows in arguments.rows
            for result in compare(model, num_rows)
        ]
        print(table(list(results[0]), [list(result.values()) for result in results]))
    publish("gpu_linear", {"results": results}, arguments)


if __name__ == "__main__":
    main()
