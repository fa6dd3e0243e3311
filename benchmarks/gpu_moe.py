"""A layer of experts on one GPU, by parts, beside its bound and beside torch._grouped_mm.

    python benchmarks/gpu_moe.py [--form packed] [--skew 0.7] [--sweep] [--models mixtral ...]
                                 [--tokens 1 ...] [--save MACHINE]

Random weights and rows, so tokens spread over experts nearly evenly, unless --skew gives the router biases
of that standard deviation: tilings that are best for even routes can be bad for those of real texts. A CUDA
graph calls several copies of the layer in turn, more than the L2 cache holds. The bound is that of the
experts which the tokens touch: the bytes of their weights at the measured copy rate, or their operations at
the measured matrix rate. Prints a table, then one line of JSON. --sweep times tilings of both GEMMs.
gpt-oss's experts are MXFP4 with biases, which torch._grouped_mm has not. --form packed packs the others in 4
bits, in groups of 128; float8 has a scale for each row, float8_tiles for each 128 x 128 weights. Beside these
runs the same layer in bfloat16.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Literal

import torch
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.forms.float_experts import ExpertWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight, num_spans, pack_exponents
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.combine import combine_rows
from octavo.gemm.portable.experts.expert_tiling import (
    AnyExpertWeight,
    GroupedTiling,
    Mxfp4Tiling,
    PackedTiling,
    row_slots,
)
from octavo.gemm.portable.experts.sort_pairs import sort_pairs
from octavo.gemm.portable.skinny_tiling import Tiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.kernels.activation import gated_activation
from octavo.kernels.compiled import compile_kernels
from octavo.layers import RMSNorm
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.layers.router import Router
from octavo.parallel import TensorParallel

# PyTorch has no public name for it yet.
_grouped_mm: Callable[..., Tensor] = vars(torch)["_grouped_mm"]
_GROUP = 128
# Shared memory of a program on a Hopper GPU.
_SHARED_BYTES = 232448
_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]


Form = Literal["bfloat16", "float8", "float8_tiles", "mxfp4", "packed"]
# What gpt-oss has not.
FORMS = ("bfloat16", "float8", "float8_tiles", "packed")
# Of a weight. 4 bits, and a byte for each 32 or a word for each 128.
BYTES = {"bfloat16": 2, "float8": 1, "float8_tiles": 1, "mxfp4": 17 / 32, "packed": 17 / 32}


@dataclass(frozen=True, slots=True)
class Shape:
    """Experts, chosen experts, hidden size, size of an expert."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    form: Form = "bfloat16"

    @property
    def expert_bytes(self) -> float:
        return BYTES[self.form] * 3 * self.hidden * self.inner

    @property
    def has_plain(self) -> bool:
        """Whether the same layer in bfloat16 runs beside."""
        return self.form not in ("bfloat16", "mxfp4")

    @property
    def activation(self) -> str:
        return "clamped_swiglu" if self.form == "mxfp4" else "silu"

    def weight(self, rows: int, size: int, num_parts: int) -> AnyExpertWeight:
        """Return a random projection of all experts, of so many parts of rows."""
        if self.form == "bfloat16":
            return ExpertWeight(random(self.num_experts, rows, size))
        if self.form in ("float8", "float8_tiles"):
            width = size if self.form == "float8" else _GROUP
            values = (random(self.num_experts, rows, size) * 50).to(torch.float8_e4m3fn)
            scales = torch.full((self.num_experts, -(-size // width), rows), 0.02, device="cuda")
            return ExpertWeight(values, scales, width)
        if self.form == "packed":
            return random_packed(self.num_experts, rows, size, num_parts)
        sizes = self.num_experts, num_spans(size), rows
        words = torch.randint(-(2**31), 2**31, (*sizes, 16), device="cuda").int()
        exponents = pack_exponents(words.new_full((1, 128), 120))[:1, :1].expand(sizes).contiguous()
        return Mxfp4ExpertWeight(size, words, exponents, random(self.num_experts, rows))


MODELS = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral": Shape(8, 2, 4096, 14336),
    "olmoe": Shape(64, 8, 2048, 1024),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "mxfp4"),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, "mxfp4"),
}


class Layers:
    """A few copies of a layer, called one after the other."""

    def __init__(self, shape: Shape, num_copies: int = 3, *, skew: float = 0.0) -> None:
        self.shape = shape
        self.experts = [random_experts(shape) for _ in range(num_copies)]
        plain = replace(shape, form="bfloat16")
        self.plain = [random_experts(plain) for _ in range(num_copies if shape.has_plain else 0)]
        self.routers = [
            Router(
                random(shape.num_experts, shape.hidden),
                shape.num_chosen,
                renormalises=True,
                bias=torch.randn(shape.num_experts, device="cuda") * skew,
            )
            for _ in range(num_copies)
        ]
        self.norm = RMSNorm(random(shape.hidden), 1e-6)

    @property
    def weights(self) -> tuple[ExpertsWeight, ExpertsWeight]:
        """Of one copy."""
        return self.experts[0].gate_up, self.experts[0].down

    def rows(self, num_tokens: int) -> Tensor:
        """Return rows [T, hidden] of length 1 a number, as a norm makes them."""
        return random(num_tokens, self.shape.hidden) * 50

    def microseconds(self, call: Callable[[int], object]) -> float:
        """Time a call of one copy, given its index."""
        turn = cycle(range(len(self.experts)))
        return graph_seconds(lambda: call(next(turn)), 2 * len(self.experts), 7) * 1e6


def random(*sizes: int) -> Tensor:
    """Return small bfloat16 numbers on the GPU."""
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02


def random_packed(num_experts: int, num_rows: int, size: int, num_parts: int) -> PackedExpertWeight:
    """Experts [E, N, K] of random integers, with scales and minimums that make values of about 0.02."""
    num_words = -(-size // 256) * 32
    words = torch.randint(-(2**31), 2**31 - 1, (num_experts, num_rows, num_words), device="cuda")
    halves = torch.tensor([0.004, -0.03], dtype=torch.float16, device="cuda")
    pairs = halves.view(torch.int32).expand(num_experts, num_words * 8 // _GROUP, num_rows).contiguous()
    factors = torch.ones(num_experts, num_parts, device="cuda")
    return PackedExpertWeight(4, size, _GROUP, words.int(), pairs, factors)


def random_experts(shape: Shape) -> StackedExperts:
    """The experts of one layer."""
    return StackedExperts(
        shape.weight(2 * shape.inner, shape.hidden, 2),
        shape.weight(shape.hidden, shape.inner, 1),
        shape.activation,
    )


def by_grouped_mm(experts: StackedExperts, x: Tensor, choice: Choice) -> Tensor:
    """The peer: torch._grouped_mm on gathered rows, with our sort, activation and sum."""
    assert isinstance(experts.gate_up, ExpertWeight)
    assert isinstance(experts.down, ExpertWeight)
    pairs, starts, num_chosen, _ = sort_pairs(choice.experts, experts.down.shape[0], 1)
    gate_up = _grouped_mm(x[pairs // num_chosen], experts.gate_up.values.transpose(1, 2), offs=starts[1:])
    inner = gated_activation(gate_up, experts.activation)
    sorted_rows = _grouped_mm(inner, experts.down.values.transpose(1, 2), offs=starts[1:])
    rows = torch.empty_like(sorted_rows)
    rows[pairs.long()] = sorted_rows
    return combine_rows(rows, choice, num_held=experts.down.shape[0])


def measure(layers: Layers, num_tokens: int, bandwidth: float, flops: float) -> dict[str, object]:
    """Time a layer and its parts for one number of tokens."""
    shape, x = layers.shape, layers.rows(num_tokens)
    hidden = x.clone()
    blocks = [
        ExpertFeedForward(layers.norm, router, experts, TensorParallel())
        for router, experts in zip(layers.routers, layers.experts, strict=True)
    ]
    choices = [router(x) for router in layers.routers]
    touched = sum(len(choice.experts.unique()) for choice in choices) / len(choices)
    most_rows = max(int(choice.experts.flatten().bincount().max()) for choice in choices)
    products = 6 * shape.hidden * shape.inner * num_tokens * shape.num_chosen
    bound = max(touched * shape.expert_bytes / bandwidth, products / flops) * 1e6
    times: dict[str, float] = {
        "block": layers.microseconds(lambda i: blocks[i](hidden, None)),
        "norm": layers.microseconds(lambda i: layers.norm(x)),
        "router": layers.microseconds(lambda i: layers.routers[i](x)),
        "grouped": layers.microseconds(lambda i: layers.experts[i].grouped(x, choices[i])),
    }
    if num_tokens <= (4 if shape.form == "packed" else 16):
        times["few"] = layers.microseconds(lambda i: layers.experts[i].few(x, choices[i]))
    product = layers.experts[0].product(x, choices[0])
    if product in ("gemv", "rounded", "persistent"):
        run = getattr(StackedExperts, product)
        times[product] = layers.microseconds(lambda i: run(layers.experts[i], x, choices[i]))
    if shape.has_plain:
        times["bfloat16"] = layers.microseconds(lambda i: layers.plain[i](x, choices[i]))
    if shape.form == "bfloat16":
        times["torch"] = layers.microseconds(lambda i: by_grouped_mm(layers.experts[i], x, choices[i]))
    best = times[product]
    return {
        "tokens": num_tokens,
        "touched": round(touched),
        "most_rows": most_rows,
        "bound_us": round(bound, 1),
        **{f"{name}_us": round(us, 1) for name, us in times.items()},
        "of_bound": round(bound / best, 3),
    }


def few_candidates(*, is_gated: bool, form: str) -> Sequence[Tiling | Mxfp4Tiling | PackedTiling]:
    """Tilings for 1 to 4 tokens."""
    if form == "packed":
        # Columns, warps, stages and parts.
        parts = (
            (32, 2, 2),
            (32, 4, 4),
            (16, 2, 2),
            (16, 4, 4),
            (64, 4, 2),
            (64, 4, 1),
            (32, 2, 1),
            (16, 1, 1),
        )
        return [PackedTiling(8, c, warps, stages, parts) for c, warps, parts in parts for stages in (2, 3, 4)]
    if form == "mxfp4":
        # Columns, parts, warps and stages.
        sizes = [(32, 4, 4, 3), (32, 4, 4, 2), (64, 4, 4, 2), (32, 8, 8, 2), (64, 2, 2, 4), (64, 1, 2, 6)]
        return [Mxfp4Tiling(8, *size) for size in sizes]
    sizes = [(4, 1024, 2), (4, 1024, 4), (8, 1024, 4), (8, 1024, 8), (2, 1024, 2), (2, 1024, 1), (4, 512, 2)]
    sizes += [(4, 2048, 4), (8, 512, 2), (2, 2048, 4), (1, 1024, 1), (2, 1024, 4), (4, 256, 1)]
    # Gate and up of a column are neighbours in a program.
    return [Tiling(*size) for size in sizes if size[0] > 1 or not is_gated]


def grouped_candidates(
    per_expert: float, form: str, *, is_gated: bool
) -> Sequence[GroupedTiling | Mxfp4Tiling | PackedTiling]:
    """Tilings for about so many rows per expert."""
    if form == "packed":
        rows = (16, 32) if per_expert <= 12 else (32, 64) if per_expert <= 48 else (64, 128)
        sizes = product(rows, (64, 128), (4, 8), (2, 3, 4))
        tilings = [PackedTiling(*size) for size in sizes]
        # Words and rows of a span.
        return [t for t in tilings if t.num_stages * (t.columns * 128 + t.rows * 512) <= _SHARED_BYTES]
    if form == "mxfp4":
        rows = (8, 16, 32, 64) if per_expert <= 48 else (64, 128, 256)
        sizes = product(rows, (128, 256), (1,), (4, 8, 16), (3, 4))
        # At most half of a thread's registers are sums.
        return [Mxfp4Tiling(*size) for size in sizes if size[0] * size[1] <= 128 * 32 * size[3]]
    # Rows, columns, warps and stages.
    if per_expert <= 48:
        sizes = [(rows, columns, 4, 6) for rows in (16, 32, 64) for columns in (64, 128)]
    elif is_gated:
        sizes = [(64, 64, 4, 4), (64, 128, 8, 4), (64, 128, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)]
        sizes += [(128, 128, 8, 4), (256, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3)]
    else:
        sizes = [(64, 128, 4, 4), (64, 256, 8, 4), (128, 128, 8, 4), (128, 128, 4, 3), (128, 128, 8, 3)]
        sizes += [(128, 256, 8, 3), (256, 128, 8, 3), (256, 64, 4, 3)]
    depths = (64,) if form == "bfloat16" else (64, 128)
    tilings = [GroupedTiling(r, c, depth, w, n, tma=True) for (r, c, w, n), depth in product(sizes, depths)]
    # Rows, and weights of gate and up.
    halves = 2 if is_gated else 1
    return [
        t
        for t in tilings
        if t.num_stages * t.depth * (2 * t.rows + halves * BYTES[form] * t.columns) <= _SHARED_BYTES
    ]


def candidates(
    layers: Layers, x: Tensor, choices: Sequence[Choice], *, is_gated: bool
) -> dict[object, Callable[[int], Tensor]]:
    """Return calls of one of the two GEMMs, given the index of a copy, by tiling."""
    shape, num_tokens = layers.shape, len(x)
    rows = x if is_gated else random(num_tokens * shape.num_chosen, shape.inner)
    per_expert = num_tokens * shape.num_chosen / shape.num_experts

    def grouped(i: int, tiling: GroupedTiling | Mxfp4Tiling | PackedTiling) -> Tensor:
        experts = layers.experts[i]
        weight, activation = (experts.gate_up, experts.activation) if is_gated else (experts.down, None)
        by_expert = sorts[i]._replace(num_slots=row_slots(num_tokens, per_expert, tiling.rows))
        grouped_gemm = experts.rows["grouped"][0 if is_gated else 1].part("grouped_gemm")
        return grouped_gemm(rows, weight, by_expert, activation, tiling)

    def few(i: int, tiling: Tiling | Mxfp4Tiling | PackedTiling) -> Tensor:
        choice, experts = choices[i], layers.experts[i]
        up, down = experts.rows["few"]
        if is_gated:
            return up.part("pair_gate_up")(rows, experts.gate_up, choice.experts, experts.activation, tiling)
        return down.part("pair_down")(rows, experts.down, choice, None, tiling)

    if num_tokens <= 4:
        tilings = few_candidates(is_gated=is_gated, form=shape.form)
        return {tiling: partial(few, tiling=tiling) for tiling in tilings}
    sorts = [sort_pairs(choice.experts, shape.num_experts, 1) for choice in choices]
    tilings = grouped_candidates(per_expert, shape.form, is_gated=is_gated)
    return {tiling: partial(grouped, tiling=tiling) for tiling in tilings}


def run_once(runs: Iterable[Callable[[int], Tensor]]) -> None:
    """Call each with the first copy."""
    for run in runs:
        run(0)


def sweep(layers: Layers, num_tokens: int) -> dict[str, object]:
    """Time tilings of both GEMMs and print the best ones."""
    x = layers.rows(num_tokens)
    choices = [router(x) for router in layers.routers]
    best: dict[str, object] = {"tokens": num_tokens}
    for name in ("gate_up", "down"):
        runs = candidates(layers, x, choices, is_gated=name == "gate_up")
        compile_kernels(partial(run_once, runs.values()), lambda done, number: None)
        ranked: list[tuple[float, str]] = []
        for tiling, run in runs.items():
            ranked.append((round(layers.microseconds(run), 1), str(tiling)))
        ranked.sort()
        print(f"{num_tokens} tokens, {name}:", flush=True)
        for us, tiling in ranked[:7]:
            print(f"    {us:8.1f}  {tiling}", flush=True)
        best[name] = ranked[:5]
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=_TOKENS)
    parser.add_argument("--form", choices=FORMS, default="bfloat16", help="of models that have no form")
    parser.add_argument("--skew", type=float, default=0.0, help="standard deviation of the router's biases")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    bandwidth, flops = copy_rate(), matrix_rate()
    results: dict[str, object] = {"copy_bytes_per_s": bandwidth, "matrix_flops": flops}
    for model in arguments.models:
        torch.manual_seed(0)
        shape = MODELS[model]
        form = shape.form if shape.form == "mxfp4" else arguments.form
        layers = Layers(replace(shape, form=form), skew=arguments.skew)
        if arguments.sweep:
            results[model] = [sweep(layers, num_tokens) for num_tokens in arguments.tokens]
            continue
        rows = [measure(layers, num_tokens, bandwidth, flops) for num_tokens in arguments.tokens]
        header = list(dict.fromkeys(name for row in rows for name in row))
        print(model)
        print(table(header, [[row.get(name, "") for name in header] for row in rows]))
        results[model] = rows
    suffix = "" if arguments.form == "bfloat16" else f"_{arguments.form}"
    suffix += f"-skew-{arguments.skew}" if arguments.skew else ""
    publish(f"gpu_moe{suffix}", {"skew": arguments.skew, "results": results}, arguments)


if __name__ == "__main__":
    main()
