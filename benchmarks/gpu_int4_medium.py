"""GEMMs of 17 to 256 rows with weights of 4 bits on one Hopper GPU: wgmma, the portable kernel, cuBLAS.

    python benchmarks/gpu_int4_medium.py [--models 8b] [--rows 17 32 64 ...] [--save MACHINE]

Times hopper_medium_linear by the tiling that Octavo chooses and by others, medium_linear, and bfloat16 by
cuBLAS with a separate activation or residual sum, at the shapes of a decoder layer. Bound and method: see
gpu_int4. Says how far results are from medium_linear's, as a share of the largest value. Then layers: all
four products with norms in between, beside bfloat16 as Octavo runs it. Prints a table, then one line of JSON
with all tilings.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from itertools import product
from multiprocessing import get_context

import torch
from gpu_int4 import KINDS, bound_us, random_blocks
from gpu_linear import MODELS, Shape, microseconds, random_numbers
from support.common import make_parser, publish, table
from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.packed import MOST_GROUPS, GroupedWeight
from octavo.gemm.hopper.packed.packed_gemm import hopper_medium_linear
from octavo.gemm.hopper.packed.packed_gemm_tiling import (
    HopperMediumTiling,
    choose_hopper_medium_tiling,
    make_tiling,
)
from octavo.gemm.plain import Linear
from octavo.gemm.portable.packed.medium import medium_linear
from octavo.gemm.portable.packed.packed_tiling import choose_medium_tiling
from octavo.kernels.activation import gated_activation
from octavo.layers import RMSNorm
from octavo.layers.block import make_input, make_output
from octavo.parallel import TensorParallel

ROWS = (17, 32, 64, 96, 128, 192, 256)
# Rows of a block, blocks, programs, and how many have room on an SM.
VARIANTS = (
    *((32, 1, programs, 2) for programs in (132, 264)),
    *((32, 1, programs, 1) for programs in (96, 132)),
    *((32, 3, programs, 1) for programs in (96, 132)),
    *((64, 1, programs, 1) for programs in (96, 132)),
    *((64, blocks, 132, 1) for blocks in (2, 3)),
    *((128, 1, programs, 1) for programs in (96, 132)),
)
_ROTATED_BYTES = 300e6
_MAX_COPIES = 24
_NUM_REPLAYS = 5
_NUM_MULTIPROCESSORS = 132
_NUM_LAYERS = 6
# Processes that compile kernels side by side.
_COMPILERS = 14

Product = Callable[[GroupedWeight], Tensor]


def tilings(shape: Shape, num_rows: int) -> list[HopperMediumTiling]:
    """Return the tiling that Octavo chooses, and others."""
    chosen = choose_hopper_medium_tiling(
        num_rows, shape.num_weight_rows, shape.size, 128, _NUM_MULTIPROCESSORS
    )
    others = [
        make_tiling(*variant) for variant in VARIANTS if num_rows <= MOST_GROUPS * variant[0] * variant[1]
    ]
    return [chosen, *(tiling for tiling in others if tiling != chosen)]


class Case:
    """A shape's operands beside the weight, for one number of rows."""

    def __init__(self, shape: Shape, num_rows: int, num_weight_rows: int) -> None:
        """Make operands; num_weight_rows: for which medium_linear is tiled."""
        self.activation = shape.activation
        self.tiling = choose_medium_tiling(num_rows, num_weight_rows)
        self.x = random_numbers(num_rows, shape.size)
        self.residual = random_numbers(num_rows, shape.num_columns) if shape.adds else None

    def hopper(self, tiling: HopperMediumTiling) -> Product:
        """Return the product by wgmma."""
        return lambda weight: hopper_medium_linear(
            self.x, weight, activation=self.activation, residual=self.residual, tiling=tiling
        )

    def portable(self, weight: GroupedWeight) -> Tensor:
        """Multiply by the portable kernel."""
        return medium_linear(
            self.x, weight, activation=self.activation, residual=self.residual, tiling=self.tiling
        )

    def cublas(self, weight: Tensor) -> Tensor:
        """Multiply in bfloat16, with a separate activation or sum."""
        out = linear(self.x, weight)
        if self.activation is not None:
            return gated_activation(out, self.activation)
        return out if self.residual is None else self.residual.add_(out)

    def result(self, multiply: Product, weight: GroupedWeight) -> Tensor:
        """Return what a product gives, added to zeros: timing has changed the residual, and must find it."""
        kept = self.residual
        self.residual = None if kept is None else torch.zeros_like(kept)
        out = multiply(weight).float()
        self.residual = kept
        return out


def packed(shape: Shape, copies: int) -> list[GroupedWeight]:
    """Return random weights in groups of 128 with minimums."""
    blocks = (random_blocks(shape.num_weight_rows, shape.size, 4, 128, mins=True) for _ in range(copies))
    return [GroupedWeight.pack(block) for block in blocks]


def compile_all(shape: Shape, num_rows: int) -> None:
    """Compile what a shape needs into Triton's cache, by one call each."""
    small = replace(shape, num_weight_rows=256)
    case, (weight,) = Case(small, num_rows, shape.num_weight_rows), packed(small, 1)
    for tiling in tilings(shape, num_rows):
        case.hopper(tiling)(weight)
    case.portable(weight)


def time_case(shape: Shape, num_rows: int, weights: list[GroupedWeight]) -> dict[str, object]:
    """Time all products of a shape."""
    case = Case(shape, num_rows, shape.num_weight_rows)
    plain = [random_numbers(shape.num_weight_rows, shape.size) for _ in weights[:6]]
    bf16 = microseconds(case.cublas, plain, _NUM_REPLAYS)
    portable = microseconds(case.portable, weights, _NUM_REPLAYS)
    expected = case.result(case.portable, weights[0])
    times: dict[str, float] = {}
    difference = 0.0
    for tiling in tilings(shape, num_rows):
        multiply = case.hopper(tiling)
        error = (case.result(multiply, weights[0]) - expected).abs().max() / expected.abs().max()
        difference = max(difference, error.item())
        times[str(astuple(tiling))] = round(microseconds(multiply, weights, _NUM_REPLAYS), 2)
    return {
        "bound_us": round(bound_us(shape, KINDS["int4"], num_rows), 2),
        "bf16_us": round(bf16, 2),
        "some_us": round(portable, 2),
        "hopper_us": next(iter(times.values())),
        "best_us": min(times.values()),
        "best": min(times, key=lambda name: times[name]),
        "difference": round(difference, 5),
        "all": times,
    }


def compare(models: list[str], all_rows: list[int]) -> list[dict[str, object]]:
    """Compile everything in parallel, then time it alone on the GPU; whole layers come last."""
    shapes = [(m, shape) for m in models for shape in MODELS[m] if shape.name != "lm_head"]
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_all, shape, rows) for (_, shape), rows in product(shapes, all_rows)]
        for job in jobs:
            job.result()
    results: list[dict[str, object]] = []
    for model, shape in shapes:
        nbytes = bound_us(shape, KINDS["int4"], 0) * 4.8e6
        weights = packed(shape, max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / nbytes))))
        for rows in all_rows:
            case = time_case(shape, rows, weights)
            results.append({"model": model, "shape": shape.name, "rows": rows, **case})
    chains = [layer(model, rows) for model, rows in product(models, all_rows)]
    return results + chains


def layer(model: str, num_rows: int) -> dict[str, object]:
    """Time a layer's products with norms in between, several layers in a row, as a model runs them.

    Products that are repeated by themselves overlap better: their sum is less.
    """
    shapes = [shape for shape in MODELS[model] if shape.name != "lm_head"]
    times = {}
    for name in ("bf16", "int4"):
        kind = KINDS[name]
        decoders = [
            [kind.make(shape.num_weight_rows, shape.size) for shape in shapes] for _ in range(_NUM_LAYERS)
        ]
        stream, norm = random_numbers(num_rows, shapes[0].size), RMSNorm(random_numbers(shapes[0].size), 1e-6)

        def run(layers: list[Linear], stream: Tensor = stream, norm: RMSNorm = norm) -> None:
            x = stream
            for own, shape in zip(layers, shapes, strict=True):
                if not shape.adds:
                    x = make_input(norm, own, shape.activation)(stream, None)
                    continue
                # Of queries, keys and values as many as there are queries.
                delta = make_output(own, None, TensorParallel())(x[:, : shape.size], stream)
                if delta is not None:
                    stream.add_(delta)

        times[name] = round(microseconds(run, decoders, _NUM_REPLAYS), 2)
    return {
        "model": model,
        "shape": "layer",
        "rows": num_rows,
        "bound_us": round(sum(bound_us(shape, KINDS["int4"], num_rows) for shape in shapes), 2),
        "bf16_us": times["bf16"],
        "some_us": "",
        "hopper_us": times["int4"],
        "best_us": "",
        "best": "",
        "difference": "",
        "all": {},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["8b"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = compare(arguments.models, arguments.rows)
    columns = [name for name in results[0] if name != "all"]
    print(table(columns, [[result[name] for name in columns] for result in results]))
    publish("gpu_int4_medium", {"results": results}, arguments)


if __name__ == "__main__":
    main()
