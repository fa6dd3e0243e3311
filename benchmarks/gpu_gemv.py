"""Products of a single row on one Hopper GPU: Octavo's GEMVs, its GEMMs of few rows, and cuBLAS.

    python benchmarks/gpu_gemv.py [--models 0.6b 8b] [--formats bf16 fp8 fp8-blocks int4] [--sweep]
                                  [--save MACHINE]

A layer is o, gate and up, down, and the next layer's qkv: each reads what the one before wrote, as in a
decoder. A CUDA graph runs several layers with weights of their own, several times the L2 cache, and its time
is divided by their number. Few rows: the skinny GEMM, or few_linear for weights of 4 bits. cuBLAS has
separate kernels for norm, activation and residual sum, and multiplies bfloat16 only. The bound is bytes of
weights over 4.8 TB/s, an H200's peak. --sweep times other tilings of the GEMV, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu_int4 import random_blocks
from gpu_linear import EPS, MODELS, Shape, microseconds, random_numbers, separate
from gpu_quantized import BYTES_PER_SECOND, FORMATS
from support.common import make_parser, publish, table
from torch import Tensor

from octavo.forms.float8 import Float8Weight
from octavo.forms.packed import GroupedWeight
from octavo.gemm.hopper.floats.dense_gemv_tiling import GemvTiling
from octavo.gemm.hopper.floats.float_gemv import gemv_linear
from octavo.gemm.hopper.packed.packed_gemv import packed_gemv_linear
from octavo.gemm.portable.packed.rows_gemm import few_linear
from octavo.gemm.portable.skinny import skinny_linear

_ROTATED_BYTES = 800e6
_TILINGS = [GemvTiling(8, 2, 104), GemvTiling(8, 3, 104), GemvTiling(4, 4, 104), GemvTiling(4, 6, 104)]
_PACKED_TILINGS = [GemvTiling(1, stages, 80) for stages in (2, 3, 4)] + [GemvTiling(2, 2, 80)]

Weight = Tensor | Float8Weight | GroupedWeight


def int4_blocks(weight: Tensor) -> GroupedWeight:
    """A packed weight of the shape of another, in groups of 128 columns."""
    return GroupedWeight.pack(random_blocks(*weight.shape, bits=4, group=128, mins=True))


_MAKERS: dict[str, Callable[[Tensor], Any]] = {"bf16": lambda weight: weight, **FORMATS, "int4": int4_blocks}
# (x, weight, norm_weight, activation, residual) -> result
Product = Callable[[Tensor, Any, Tensor | None, str | None, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of products that follow one another, and of their norms."""

    weights: tuple[Weight, ...]
    norms: tuple[Tensor | None, ...]


class Chain:
    """Layers of a decoder, or LM heads, in one format."""

    def __init__(self, shapes: tuple[Shape, ...], form: str) -> None:
        self.shapes = shapes
        numbers = sum(shape.num_weight_rows * shape.size for shape in shapes)
        # In 4 bits, a group of 128 has a scale and a minimum of 16 bits each.
        self.layer_bytes = numbers * {"bf16": 2.0, "int4": 0.5 + 4 / 128}.get(form, 1.0)
        self.layers = [
            self._make_layer(form) for _ in range(max(2, round(_ROTATED_BYTES / self.layer_bytes)))
        ]
        self.x = random_numbers(1, shapes[0].size)
        self.hidden = self.x if shapes[0].has_norm else random_numbers(1, shapes[0].num_columns)

    def _make_layer(self, form: str) -> Layer:
        weights = [random_numbers(shape.num_weight_rows, shape.size) for shape in self.shapes]
        norms = [random_numbers(shape.size) if shape.has_norm else None for shape in self.shapes]
        return Layer(tuple(map(_MAKERS[form], weights)), tuple(norms))

    def microseconds(self, product: Product) -> float:
        """Median time of a layer."""
        return microseconds(lambda layer: self.run(layer, self.x, product), self.layers)

    def run(self, layer: Layer, x: Tensor, product: Product) -> Tensor:
        """Return the last product of a layer whose first one is of x."""
        for shape, weight, norm in zip(self.shapes, layer.weights, layer.norms, strict=True):
            given = self.hidden if shape.has_norm else x
            x = product(given, weight, norm, shape.activation, self.hidden if shape.adds else None)
        return x


def fused(function: Callable[..., Tensor], **options: Any) -> Product:
    """One of Octavo's products."""

    def product(
        x: Tensor, weight: Any, norm: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        return function(
            x, weight, norm_weight=norm, eps=EPS, activation=activation, residual=residual, **options
        )

    return product


def compare(model: str, form: str, sweep: bool) -> Iterator[dict[str, object]]:
    """Time a layer, and in bfloat16 the LM head."""
    qkv, o, gate_up, down, head = MODELS[model]
    for name, shapes in (("layer", (o, gate_up, down, qkv)), ("lm_head", (head,))):
        if name == "lm_head" and form != "bf16":
            continue
        chain = Chain(shapes, form)
        bound_us = chain.layer_bytes / BYTES_PER_SECOND * 1e6
        gemv, few = (packed_gemv_linear, few_linear) if form == "int4" else (gemv_linear, skinny_linear)
        times = {"gemv_us": fused(gemv), "few_rows_us": fused(few)}
        if form == "bf16":
            times["cublas_us"] = separate
        us = {label: chain.microseconds(product) for label, product in times.items()}
        yield {
            **{"model": model, "format": form, "what": name, "mb": round(chain.layer_bytes / 1e6, 1)},
            **{"bound_us": round(bound_us, 1), "cublas_us": ""},
            **{label: round(value, 1) for label, value in us.items()},
            "of_bound": round(bound_us / us["gemv_us"], 3),
            "speedup": round(us["few_rows_us"] / us["gemv_us"], 2),
        }
        for tiling in (_PACKED_TILINGS if form == "int4" else _TILINGS) if sweep else ():
            try:
                found = round(chain.microseconds(fused(gemv, tiling=tiling)), 1)
            except Exception as error:
                found = f"does not run: {str(error)[:100]}"
            print(model, form, name, tiling, found, flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--formats", choices=_MAKERS, nargs="+", default=list(_MAKERS))
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    results = [
        result
        for model in arguments.models
        for form in arguments.formats
        for result in compare(model, form, arguments.sweep)
    ]
    print(table(list(results[0]), [list(result.values()) for result in results]))
    publish("gpu_gemv", {"results": results}, arguments)


if __name__ == "__main__":
    main()
