"""Products of linear layers on a CPU, by the kinds of weights that Octavo multiplies.

float32 by MKL, bfloat16 by C and oneDNN, int8 and blocks of 4 and 8 bits by C. A layer has more copies
than the caches hold, multiplied in turn as a model's layers are. Prints the best milliseconds of a product
by the rows of x; the bound of one row, which reads the weight once at the measured bandwidth; and how many
times as fast as float32 bfloat16 is. The last line is JSON.

    python benchmarks/cpu_linear.py [--shapes 135m,0.6b,8b] [--kinds float32,bfloat16] [--save MACHINE]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from support.common import make_parser, publish, read_bandwidth, table
from torch import Tensor

from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.gemm.cpu.bfloat16 import matrix_units
from octavo.gemm.cpu.block_linear import BlockLinear, tiled
from octavo.gemm.linear import Linear
from octavo.gemm.make_linear import make_linear

# Outputs and inputs of the largest products of a layer: gate and up in one, and down.
SHAPES = {"135m": ((3072, 576), (576, 1536)), "0.6b": ((6144, 1024), (1024, 3072)), "8b": ((24576, 4096),)}
ROWS = (1, 4, 16, 64, 512)
# Of all copies in float32: half of it is more than the caches of a server's CPU hold.
COPIED_BYTES, MAX_COPIES = 2**29, 32
# Seconds for the calls of one figure.
SECONDS = 0.3


def block_layer(bits: int, weight: Tensor) -> Linear:
    """A layer of a weight's shape in blocks; its numbers do not matter."""
    quants = torch.zeros(weight.shape, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.ones(weight.shape[0], weight.shape[1] // BLOCK, dtype=torch.float16)
    return BlockLinear(tiled([BlockWeight(bits, quants, scales, scales if bits == 4 else None)]))


# Name -> (layer of a float32 weight, bytes of a number).
KINDS: dict[str, tuple[Callable[[Tensor], Linear], float]] = {
    "float32": (make_linear, 4),
    "bfloat16": (partial(make_linear, quantization="bf16"), 2),
    "int8": (partial(make_linear, quantization="int8"), 1),
    "blocks-8": (partial(block_layer, 8), 1 + 2 / BLOCK),
    "blocks-4": (partial(block_layer, 4), 0.5 + 4 / BLOCK),
}


def best_ms(layers: list[Linear], x: Tensor) -> float:
    """The least time of a product, of rounds through all layers."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    layers[0](x)
    while True:
        start = time.perf_counter()
        for layer in layers:
            layer(x)
        stop = time.perf_counter()
        best = min(best, (stop - start) / len(layers))
        if stop > end:
            return best * 1000


def measure(kinds: list[str], num_outputs: int, size: int) -> dict[str, dict[int, float]]:
    """Milliseconds by kind and rows."""
    weight = torch.rand(num_outputs, size).sub_(0.5)
    copies = max(1, min(MAX_COPIES, COPIED_BYTES // weight.nbytes))
    times: dict[str, dict[int, float]] = {}
    for kind in kinds:
        layers = [KINDS[kind][0](weight) for _ in range(copies)]
        times[kind] = {rows: best_ms(layers, torch.rand(rows, size).sub_(0.5)) for rows in ROWS}
    return times


def show(shape: tuple[int, int], times: dict[str, dict[int, float]], bandwidth: float) -> None:
    """Print one shape's table."""
    numbers = shape[0] * shape[1]
    rows = []
    for kind, row in times.items():
        bound = numbers * KINDS[kind][1] / bandwidth * 1000
        rows.append([kind, *(f"{ms:.3f}" for ms in row.values()), f"{bound:.3f}"])
    if {"float32", "bfloat16"} <= times.keys():
        ratios = (times["float32"][number] / times["bfloat16"][number] for number in ROWS)
        rows.append(["bfloat16 is faster", *(f"{ratio:.2f}x" for ratio in ratios), ""])
    print(f"\n{shape[0]} outputs of {shape[1]} inputs: ms of a product by the rows of x")
    print(table(["weights", *map(str, ROWS), "bound of 1 row"], rows), flush=True)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure all shapes."""
    bandwidth, results = read_bandwidth(), {}
    print(
        f"{torch.get_num_threads()} threads, {bandwidth / 1e9:.1f} GB/s, units for bfloat16: {matrix_units()}"
    )
    for name in arguments.shapes.split(","):
        for shape in SHAPES[name]:
            times = measure(arguments.kinds.split(","), *shape)
            show(shape, times, bandwidth)
            results[f"{name} {shape[0]}x{shape[1]}"] = times
    return {
        "threads": torch.get_num_threads(),
        "bandwidth": bandwidth,
        "units": matrix_units(),
        "ms": results,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    with torch.inference_mode():
        figures = run(arguments)
    publish("cpu_linear", figures, arguments)


if __name__ == "__main__":
    main()
