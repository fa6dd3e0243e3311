"""A decoder's products on one NVIDIA GPU: microseconds by form of the weight, rows and product.

    python benchmarks/gpu_products.py [--models 0.6b 8b] [--forms bf16 fp8 int4 ...] [--rows 1 2 4 ...]
                                      [--generation 8] [--save MACHINE]

Each is a block's input (norm, product, activation) or output (product, residual sum), as a decoder runs it,
in a CUDA graph over several copies of the weights, so that weights come from memory. "layer" is all of a
layer's products, one after the other. Beside each stands cuBLAS in bfloat16 with separate kernels for norm,
activation and sum. The bound is bytes over 4.8 TB/s or operations over 989 TFLOP/s (float8: 1979), whichever
takes longer: an H200's peaks. --generation 8 takes the kernels that an older GPU would run. gpu_moe.py times
experts. Prints a table, then one line of JSON.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context

from support.common import make_parser, publish, table
from support.products import FORMS, MODELS, Chain, Shape, bound_us, torch_microseconds

from octavo.kernels.device import GENERATION_VARIABLE

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
# Processes that compile kernels side by side.
_COMPILERS = 14


def chains(model: str, form: str) -> list[tuple[str, tuple[Shape, ...]]]:
    """Return what is timed: each product, the layer, and in bfloat16 the LM head."""
    *layer, head = MODELS[model]
    found: list[tuple[str, tuple[Shape, ...]]] = [(shape.name, (shape,)) for shape in layer]
    found.append(("layer", tuple(layer)))
    return [*found, ("lm_head", (head,))] if form == "bf16" else found


def compile_chain(model: str, form: str, num_rows: int) -> None:
    """Compile what a layer needs into Triton's cache, in a process of its own."""
    *layer, _ = MODELS[model]
    Chain(layer, FORMS[form]).microseconds(num_rows)


def compare(model: str, form: str, rows: Sequence[int]) -> Iterator[dict[str, object]]:
    """Time a model's products in one form."""
    peer = cache(torch_microseconds)
    for name, shapes in chains(model, form):
        chain = Chain(shapes, FORMS[form])
        for num_rows in rows:
            if name == "lm_head" and num_rows > 256:
                # So many logits are never computed at once.
                continue
            us, torch_us = chain.microseconds(num_rows), sum(peer(shape, num_rows) for shape in shapes)
            bound = sum(bound_us(shape, FORMS[form], num_rows) for shape in shapes)
            yield {
                "model": model,
                "form": form,
                "what": name,
                "rows": num_rows,
                "bound_us": round(bound, 2),
                "us": round(us, 2),
                "cublas_us": round(torch_us, 2),
                "of_bound": round(bound / us, 3),
                "speedup": round(torch_us / us, 2),
            }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=["bf16", "fp8", "fp8-tiles", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--generation", help="take the kernels of an older GPU: 8")
    arguments = parser.parse_args()
    if arguments.generation:
        # Before the first product is chosen, here and in the processes that compile.
        os.environ[GENERATION_VARIABLE] = arguments.generation
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        cases = product(arguments.models, arguments.forms, arguments.rows)
        for job in [pool.submit(compile_chain, *case) for case in cases]:
            job.result()
    results = [
        result
        for model, form in product(arguments.models, arguments.forms)
        for result in compare(model, form, arguments.rows)
    ]
    print(table(list(results[0]), [list(result.values()) for result in results]))
    suffix = f"-generation-{arguments.generation}" if arguments.generation else ""
    publish(f"gpu_products{suffix}", {"results": results}, arguments)


if __name__ == "__main__":
    main()
