"""A decoder's GEMMs with quantised weights on one NVIDIA GPU, beside the same GEMMs in bfloat16.

    python benchmarks/gpu_quantized.py [--models 0.6b 8b] [--rows 1 2 4 ...] [--formats fp8 fp8-blocks]
                                       [--paths] [--save MACHINE]
    python benchmarks/gpu_quantized.py --sweep [--models 8b] [--rows ...]

Each is a block's input (norm, product, activation) or output (product, residual sum), as a decoder runs it,
in a CUDA graph over several copies of the weights, so that weights come from memory. The bound is the larger
of bytes over 4.8 TB/s and operations over 1979 TFLOP/s (float8) or 989 (bfloat16), an H200's peaks. --paths
times every path of float8 weights alone, also those that are not chosen; --sweep times tilings.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from gpu_linear import MODELS, Shape, microseconds, random_numbers
from support.common import make_parser, publish, table
from torch import Tensor

from octavo.forms.base import QuantisedWeight
from octavo.forms.float8 import FLOAT8, Float8Weight, quantise, quantise_rows
from octavo.gemm import float8_linear as float8_gpu
from octavo.gemm.portable.float8_gemm import float8_linear
from octavo.gemm.portable.float8_tiling import (
    Float8Tiling,
    choose_path,
    has_gemv,
    has_hopper,
    has_many,
    has_torch,
)
from octavo.gemm.portable.skinny import skinny_linear
from octavo.gemm.portable.skinny_tiling import Tiling
from octavo.gemm.table import make_quantised_linear
from octavo.layers import RMSNorm, make_input, make_linear, make_output
from octavo.parallel import TensorParallel

BYTES_PER_SECOND = 4.8e12
FLOPS = {"bf16": 989e12, "fp8": 1979e12, "fp8-blocks": 1979e12}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
_PATHS = ("gemv", "skinny", "hopper", "float8", "many", "torch")
_ROTATED_BYTES = 400e6
_TILE = 128
# Processes that compile kernels side by side.
_COMPILERS = 14


def fp8_blocks(weight: Tensor) -> Float8Weight:
    """Round a weight to float8 with a scale for each 128 x 128 numbers, all alike: only speed is measured."""
    scales = torch.full((-(-weight.shape[0] // _TILE), -(-weight.shape[1] // _TILE)), 1e-3, device="cuda")
    return Float8Weight((weight * 1e3).to(FLOAT8), scales, _TILE, _TILE)


# Format -> quantises a bfloat16 weight.
FORMATS: dict[str, Callable[[Tensor], QuantisedWeight]] = {"fp8": quantise, "fp8-blocks": fp8_blocks}


class Case:
    """A shape's block input or output in one format, several copies."""

    def __init__(self, shape: Shape, form: str, copies: int = 28) -> None:
        self.shape = shape
        copies = max(1, min(copies, round(_ROTATED_BYTES / shape.weight_bytes)))
        weights = [random_numbers(shape.num_weight_rows, shape.size) for _ in range(copies)]
        if form == "bf16":
            linears = [make_linear(weight) for weight in weights]
            self.bytes_per_number = 2.0
        else:
            quantised = [FORMATS[form](weight) for weight in weights]
            linears = [make_quantised_linear([each], dtype=torch.bfloat16) for each in quantised]
            self.bytes_per_number = 1.0
        self.is_row_scaled = form == "fp8"
        norm = RMSNorm(random_numbers(shape.size), 1e-6)
        if shape.adds:
            self._blocks: list[Any] = [make_output(each, None, TensorParallel()) for each in linears]
        else:
            self._blocks = [make_input(norm, each, shape.activation) for each in linears]
        self.flops = FLOPS[form]

    def microseconds(self, num_rows: int) -> float:
        """Median time of one of them."""
        x = random_numbers(num_rows, self.shape.size)
        if not self.shape.adds:
            return microseconds(lambda block: block(x), self._blocks)
        hidden = random_numbers(num_rows, self.shape.num_columns)

        def run(block: Any) -> None:
            delta = block(x, hidden)
            if delta is not None:
                hidden.add_(delta)

        return microseconds(run, self._blocks)

    def bound_us(self, num_rows: int) -> float:
        """Microseconds that bytes or operations need."""
        shape = self.shape
        num_bytes = shape.num_weight_rows * shape.size * self.bytes_per_number
        num_bytes += 2 * num_rows * (shape.size + shape.num_columns * (2 if shape.adds else 1))
        operations = 2 * num_rows * shape.num_weight_rows * shape.size
        return max(num_bytes / BYTES_PER_SECOND, operations / self.flops) * 1e6


@contextmanager
def only(path: str) -> Iterator[None]:
    """Let all products of float8 weights take one path."""
    before = float8_gpu.choose_path
    float8_gpu.choose_path = lambda num_rows, weight: path
    try:
        yield
    finally:
        float8_gpu.choose_path = before


def compile_paths(model: str, index: int, num_rows: int, form: str) -> None:
    """Compile the kernels of all paths into Triton's cache."""
    dict(time_paths(Case(MODELS[model][index], form, 1), num_rows))


def compare(model: str, rows: list[int], formats: list[str], all_paths: bool) -> Iterator[dict[str, object]]:
    """Time a model's GEMMs but the LM head, which stays in bfloat16, at some numbers of rows."""
    for shape in MODELS[model][:-1]:
        cases = {form: Case(shape, form) for form in ("bf16", *formats)}
        for num_rows in rows:
            plain_us = cases["bf16"].microseconds(num_rows)
            for form in formats:
                case = cases[form]
                bound_us, us = case.bound_us(num_rows), case.microseconds(num_rows)
                result: dict[str, object] = {
                    **{"model": model, "shape": shape.name, "rows": num_rows, "format": form},
                    **{"bound_us": round(bound_us, 2), "us": round(us, 2), "bf16_us": round(plain_us, 2)},
                    **{"of_bound": round(bound_us / us, 3), "speedup": round(plain_us / us, 2)},
                    "path": choose_path(num_rows, case_weight(case)),
                }
                if all_paths:
                    result |= dict(time_paths(case, num_rows))
                print(result, flush=True)
                yield result


def case_weight(case: Case) -> Float8Weight:
    """The weight of one of a case's layers."""
    linear = case._blocks[0].linear
    return linear.weight


def time_paths(case: Case, num_rows: int) -> Iterator[tuple[str, object]]:
    """Time each path that can run."""
    for path in _PATHS:
        can_run = {
            "gemv": num_rows == 1 and has_gemv(case_weight(case)),
            "skinny": num_rows <= 4,
            "hopper": num_rows <= 256 and has_hopper(case_weight(case)),
            "float8": num_rows >= 2,
            "many": num_rows >= 2 and has_many(case_weight(case)),
            "torch": num_rows >= 64 and has_torch(case_weight(case)),
        }
        us: object = ""
        if can_run[path]:
            with only(path):
                us = round(case.microseconds(num_rows), 2)
        yield path, us


def skinny_tilings() -> list[Tiling]:
    """Tilings of the skinny GEMM to try."""
    sizes = [(2, 2048, 2), (2, 4096, 4), (2, 4096, 8), (4, 1024, 1), (4, 2048, 2), (4, 2048, 4), (4, 4096, 4)]
    sizes += [(4, 4096, 8), (8, 512, 1), (8, 1024, 2), (8, 2048, 4), (8, 1024, 1), (16, 512, 1)]
    return [Tiling(*size) for size in sizes]


def gemm_tilings(num_rows: int) -> list[Float8Tiling]:
    """Tilings of the GEMM on tensor cores to try."""
    rows = next((r for r in (16, 32, 64) if num_rows <= r), 128)
    sizes = [(16, 512, 4, 4), (32, 256, 4, 6), (32, 512, 4, 4), (64, 128, 4, 8), (64, 256, 4, 4)]
    sizes += [(64, 256, 4, 6), (64, 512, 4, 3), (128, 128, 4, 5), (128, 256, 8, 3), (128, 128, 8, 4)]
    return [Float8Tiling(rows, *size) for size in sizes]


class Sweep:
    """Tilings of one shape at one number of rows, on one kernel."""

    def __init__(self, model: str, index: int, num_rows: int, form: str, kernel: str) -> None:
        self.shape = MODELS[model][index]
        self.label = f"{model} {self.shape.name} rows {num_rows} {form} {kernel}"
        self.num_rows, self.form, self.kernel = num_rows, form, kernel
        tilings = skinny_tilings() if kernel == "skinny" else gemm_tilings(num_rows)
        width = _TILE if form == "fp8-blocks" else self.shape.size
        self.tilings = [tiling for tiling in tilings if kernel == "skinny" or tiling.depth <= width]

    def call(self, shape: Shape, tiling: Any) -> Callable[[Float8Weight], Tensor]:
        """Return what multiplies one weight of a shape."""
        x = random_numbers(self.num_rows, shape.size)
        residual = random_numbers(self.num_rows, shape.num_columns) if shape.adds else None
        options: dict[str, Any] = {"activation": shape.activation, "residual": residual, "tiling": tiling}
        if self.kernel == "skinny":
            norm = random_numbers(shape.size) if shape.has_norm else None
            return lambda weight: skinny_linear(x, weight, norm_weight=norm, eps=1e-6, **options)
        rows, scales = quantise_rows(x)
        options |= {"row_scales": scales, "dtype": torch.bfloat16}
        return lambda weight: float8_linear(rows, weight, **options)

    def compile(self) -> None:
        """Compile all tilings into Triton's cache, by one call each."""
        shape = replace(self.shape, num_weight_rows=1024)
        weight = FORMATS[self.form](random_numbers(1024, shape.size))
        assert isinstance(weight, Float8Weight)
        for tiling in self.tilings:
            try:
                self.call(shape, tiling)(weight)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{self.label}: {tiling} does not run: {str(error)[:100]!r}", flush=True)

    def time(self) -> None:
        """Print the best tilings."""
        shape = self.shape
        copies = max(2, min(28, round(_ROTATED_BYTES / shape.weight_bytes)))
        numbers = [random_numbers(shape.num_weight_rows, shape.size) for _ in range(copies)]
        weights = [FORMATS[self.form](each) for each in numbers]
        times = {}
        for tiling in self.tilings:
            try:
                times[tiling] = microseconds(self.call(shape, tiling), weights, 5)
            except Exception as error:
                print(f"{self.label}: {tiling} does not run: {str(error)[:100]!r}", flush=True)
        bound = shape.num_weight_rows * shape.size / BYTES_PER_SECOND * 1e6
        best = sorted(times.items(), key=lambda item: item[1])[:3]
        found = "  ".join(f"{us:.2f} {tuple(vars_of(tiling))}" for tiling, us in best)
        print(f"{self.label}: bytes {bound:.2f} us; {found}", flush=True)


def vars_of(tiling: Any) -> Iterator[int]:
    """Return the numbers of a tiling."""
    return (getattr(tiling, name) for name in tiling.__slots__)


def compile_sweep(*arguments: Any) -> None:
    """Compile one sweep's kernels, in a process of its own."""
    Sweep(*arguments).compile()


def run_sweep(models: list[str], rows: list[int]) -> None:
    """Compile everything in parallel, then time it alone on the GPU."""
    arguments = [
        (model, index, num_rows, "fp8", kernel)
        for model in models
        for num_rows in rows
        for index in range(len(MODELS[model]) - 1)
        for kernel, least, most in (("skinny", 1, 4), ("float8", 2, 256))
        if least <= num_rows <= most and (num_rows > 1) == (kernel == "float8")
    ]
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_sweep, *each) for each in arguments]:
            done.result()
    for each in arguments:
        Sweep(*each).time()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.add_argument("--paths", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if arguments.sweep:
        run_sweep(arguments.models, arguments.rows)
        return
    if arguments.paths:
        cases = [
            (model, index, num_rows, form)
            for model in arguments.models
            for index in range(len(MODELS[model]) - 1)
            for num_rows in arguments.rows
            for form in arguments.formats
        ]
        with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
            for done in [pool.submit(compile_paths, *each) for each in cases]:
                done.result()
    results = [
        result
        for model in arguments.models
        for result in compare(model, arguments.rows, arguments.formats, arguments.paths)
    ]
    print(table(list(results[0]), [list(result.values()) for result in results]))
    publish("gpu_quantized", {"results": results}, arguments)


if __name__ == "__main__":
    main()
