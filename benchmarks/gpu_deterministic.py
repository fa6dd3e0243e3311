"""What deterministic=True costs on one NVIDIA GPU.

Prints tokens per second with deterministic=False and True, and their ratio: two engines in one process run
each workload alternately. Then times row-invariant GEMMs beside cuBLAS: microseconds, and the share of the
bound, which is weights at the measured copy bandwidth or operations at the measured matrix rate, whichever
takes longer. The last line is JSON.

    python benchmarks/gpu_deterministic.py [--model 0.6b] [--nano] [--save MACHINE]
"""

from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES
from support.gpu_model import load, run
from support.gpu_timing import copy_bandwidth, matrix_flops
from support.gpu_workloads import WORKLOADS
from support.products import microseconds, random_numbers
from torch.nn.functional import linear

from octavo.gemm.portable.invariant import invariant_linear

_ROWS = (1, 64, 256, 8192)
# Bytes of weights that calls go through, several times an L2 cache of 50 MB, so that they come from memory.
_ROTATED_BYTES = 300e6


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--nano", action="store_true", help="run the nano workload too")
    arguments = parser.parse_args()
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    workloads = ["single", "mid", "nano"] if arguments.nano else ["single", "mid"]
    served = serve(arguments.model, workloads)
    print(table(list(served[0]), [list(result.values()) for result in served]))
    products = [
        compare(num_rows, name, shape, bandwidth, flops)
        for name, shape in product_shapes(arguments.model).items()
        for num_rows in _ROWS
        # Logits of so many rows are never computed at once.
        if name != "lm_head" or num_rows <= 256
    ]
    print(table(list(products[0]), [list(result.values()) for result in products]))
    report: dict[str, object] = {
        "model": arguments.model,
        "copy_bytes_per_s": bandwidth,
        "matrix_flops": flops,
        "workloads": served,
        "products": products,
    }
    publish("gpu_deterministic", report, arguments)


def serve(size: str, workloads: list[str]) -> list[dict[str, object]]:
    """Run each workload three times on both engines, alternately; tokens/s of the better of the last two."""
    llms = [load(size, deterministic=mode, memory_fraction=0.4) for mode in (False, True)]
    results: list[dict[str, object]] = []
    for name in workloads:
        workload = WORKLOADS[name]()
        turns = [[run(llm, workload) for llm in llms] for _ in range(3)][1:]
        usual, deterministic = (workload.rate(min(seconds)) for seconds in zip(*turns, strict=True))
        results.append(
            {
                "workload": name,
                "usual tokens/s": round(usual, 1),
                "deterministic tokens/s": round(deterministic, 1),
                "ratio": round(deterministic / usual, 3),
            }
        )
    return results


def product_shapes(size: str) -> dict[str, tuple[int, int]]:
    """(N, K) of a decoder layer's GEMMs and of the LM head."""
    hidden, _, heads, inner = SHAPES[size]
    return {
        "qkv": (128 * (heads + 16), hidden),
        "o": (hidden, 128 * heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (151936, hidden),
    }


def compare(
    num_rows: int, name: str, shape: tuple[int, int], bandwidth: float, flops: float
) -> dict[str, object]:
    """Time one GEMM by the row-invariant kernel and by cuBLAS."""
    num_columns, size = shape
    num_copies = max(2, round(_ROTATED_BYTES / (2 * num_columns * size)))
    weights = [random_numbers(num_columns, size) for _ in range(num_copies)]
    x = random_numbers(num_rows, size)
    invariant_us = microseconds(lambda weight: invariant_linear(x, weight), weights)
    cublas_us = microseconds(lambda weight: linear(x, weight), weights)
    operations = 2 * num_rows * num_columns * size
    bound_us = max(2 * num_columns * size / bandwidth, operations / flops) * 1e6
    return {
        "product": name,
        "rows": num_rows,
        "invariant us": round(invariant_us, 2),
        "cuBLAS us": round(cublas_us, 2),
        "of bound": round(bound_us / invariant_us, 3),
        "TFLOP/s": round(operations / invariant_us / 1e6, 1),
    }


if __name__ == "__main__":
    main()
