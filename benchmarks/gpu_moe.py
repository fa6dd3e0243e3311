"""A layer of experts on one GPU, by parts, beside its bound and beside torch._grouped_mm.

    python benchmarks/gpu_moe.py [--models 30b-a3b mixtral olmoe gpt-oss-20b] [--tokens 1 2 4 ... 4096]
                                 [--save MACHINE]
    python benchmarks/gpu_moe.py --sweep [--models ...] [--tokens ...]

Random weights and rows, so tokens spread over experts nearly evenly. A CUDA graph calls several copies of
the layer in turn, more than the L2 cache holds. The bound is that of the experts which the tokens touch: the
bytes of their weights at the measured copy rate, or their operations at the measured matrix rate. Prints a
table, then one line of JSON. --sweep times tilings of both products. gpt-oss's experts are MXFP4 with biases,
which torch._grouped_mm has not.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from torch import Tensor

from octavo.gpu.kernels import compile_kernels
from octavo.layers import RMSNorm
from octavo.layers.linear.skinny_tiling import Tiling
from octavo.layers.moe.feed_forward import ExpertFeedForward
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.router import Choice, Router
from octavo.layers.moe.stacked import StackedExperts, expert_kernels
from octavo.layers.moe.tiling import GroupedTiling, row_slots
from octavo.layers.moe.triton.combine import combine_rows
from octavo.layers.moe.triton.grouped import SortedPairs
from octavo.layers.moe.triton.sort import sort_pairs
from octavo.layers.moe.weight import ExpertWeight
from octavo.layers.triton.activation import gated_activation
from octavo.parallel import TensorParallel

# PyTorch has no public name for it yet.
_grouped_mm: Callable[..., Tensor] = vars(torch)["_grouped_mm"]
_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]


@dataclass(frozen=True, slots=True)
class Shape:
    """Experts, chosen experts, hidden size, size of an expert."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    is_mxfp4: bool = False

    @property
    def expert_bytes(self) -> float:
        return (17 / 32 if self.is_mxfp4 else 2) * 3 * self.hidden * self.inner

    @property
    def activation(self) -> str:
        return "clamped_swiglu" if self.is_mxfp4 else "silu"

    def weight(self, rows: int, size: int) -> ExpertWeight | Mxfp4ExpertWeight:
        """Return a random projection of all experts."""
        if not self.is_mxfp4:
            return ExpertWeight(random(self.num_experts, rows, size))
        units = torch.randint(
            -(2**15), 2**15, (self.num_experts, rows, size // 4), dtype=torch.int16, device="cuda"
        )
        exponents = units.new_full((self.num_experts, rows, size // 32), 120, dtype=torch.uint8)
        return Mxfp4ExpertWeight(units, exponents, random(self.num_experts, rows))


MODELS = {
    "30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral": Shape(8, 2, 4096, 14336),
    "olmoe": Shape(64, 8, 2048, 1024),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, is_mxfp4=True),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, is_mxfp4=True),
}


class Layers:
    """A few copies of a layer, called one after the other."""

    def __init__(self, shape: Shape, num_copies: int = 3) -> None:
        self.shape = shape
        self.experts = [
            StackedExperts(
                shape.weight(2 * shape.inner, shape.hidden),
                shape.weight(shape.hidden, shape.inner),
                shape.activation,
            )
            for _ in range(num_copies)
        ]
        self.routers = [
            Router(random(shape.num_experts, shape.hidden), shape.num_chosen, renormalises=True)
            for _ in range(num_copies)
        ]
        self.norm = RMSNorm(random(shape.hidden), 1e-6)

    def rows(self, num_tokens: int) -> Tensor:
        """Return rows [T, hidden] of length 1 a number, as a norm makes them."""
        return random(num_tokens, self.shape.hidden) * 50

    def microseconds(self, call: Callable[[int], object]) -> float:
        """Time a call of one copy, given its index."""
        turn = itertools.cycle(range(len(self.experts)))
        return graph_seconds(lambda: call(next(turn)), 2 * len(self.experts), 7) * 1e6


def random(*sizes: int) -> Tensor:
    """Return small bfloat16 numbers on the GPU."""
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02


def by_grouped_mm(experts: StackedExperts, x: Tensor, choice: Choice) -> Tensor:
    """The peer: torch._grouped_mm on gathered rows, with our sort, activation and sum."""
    num_chosen = choice.experts.shape[1]
    pairs, starts = sort_pairs(choice.experts, experts.down.values.shape[0])
    gate_up = _grouped_mm(x[pairs // num_chosen], experts.gate_up.values.transpose(1, 2), offs=starts[1:])
    inner = gated_activation(gate_up, experts.activation)
    sorted_rows = _grouped_mm(inner, experts.down.values.transpose(1, 2), offs=starts[1:])
    rows = torch.empty_like(sorted_rows)
    rows[pairs.long()] = sorted_rows
    return combine_rows(rows, choice.weights)


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
    products = 6 * shape.hidden * shape.inner * num_tokens * shape.num_chosen
    bound = max(touched * shape.expert_bytes / bandwidth, products / flops) * 1e6
    times: dict[str, float] = {
        "block": layers.microseconds(lambda i: blocks[i](hidden, None)),
        "norm": layers.microseconds(lambda i: layers.norm(x)),
        "router": layers.microseconds(lambda i: layers.routers[i](x)),
        "grouped": layers.microseconds(lambda i: layers.experts[i].grouped(x, choices[i])),
    }
    if num_tokens <= 16:
        times["few"] = layers.microseconds(lambda i: layers.experts[i].few(x, choices[i]))
    if not shape.is_mxfp4:
        times["torch"] = layers.microseconds(lambda i: by_grouped_mm(layers.experts[i], x, choices[i]))
    best = min(times["grouped"], times.get("few", times["grouped"]))
    return {
        "tokens": num_tokens,
        "touched": round(touched),
        "bound_us": round(bound, 1),
        **{f"{name}_us": round(us, 1) for name, us in times.items()},
        "of_bound": round(bound / best, 3),
    }


def few_candidates(*, is_gated: bool, is_mxfp4: bool) -> list[Tiling]:
    """Tilings of one row's products."""
    if is_mxfp4:
        sizes = [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 4), (16, 4)]
        return [Tiling(rows, depth, warps) for rows, warps in sizes for depth in (1024, 2048)]
    sizes = [(4, 1024, 2), (4, 1024, 4), (8, 1024, 4), (8, 1024, 8), (2, 1024, 2), (2, 1024, 1), (4, 512, 2)]
    more = (
        [(4, 2048, 4), (8, 512, 2), (2, 2048, 4)] if is_gated else [(1, 1024, 1), (2, 1024, 4), (4, 256, 1)]
    )
    return [Tiling(*size) for size in sizes + more]


def grouped_candidates(per_expert: float, *, is_gated: bool, is_mxfp4: bool) -> list[GroupedTiling]:
    """Tilings for about so many rows per expert: rows, columns, warps and stages, all of depth 64.

    Those of MXFP4 have other depths.
    """
    if is_mxfp4:
        few = per_expert <= 48
        sizes = itertools.product(
            (16, 32, 64) if few else (64, 128, 256), (64, 128), (64, 128, 256), (4, 8), (3, 5)
        )
        return [GroupedTiling(*size, tma=False) for size in sizes]
    if per_expert <= 48:
        sizes = [(rows, columns, 4, 6) for rows in (16, 32, 64) for columns in (64, 128)]
    elif is_gated:
        sizes = [(64, 64, 4, 4), (64, 128, 8, 4), (64, 128, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)]
        sizes += [(128, 128, 8, 4), (256, 64, 8, 3), (128, 64, 4, 3)]
    else:
        sizes = [(64, 128, 4, 4), (64, 256, 8, 4), (128, 128, 8, 4), (128, 128, 4, 3), (128, 128, 8, 3)]
        sizes += [(128, 256, 8, 3), (256, 128, 8, 3), (256, 64, 4, 3)]
    return [GroupedTiling(r, c, 64, warps, stages, tma=True) for r, c, warps, stages in sizes]


def run_once(runs: Iterable[Callable[[int], Tensor]]) -> None:
    """Call each with the first copy."""
    for run in runs:
        run(0)


def sweep(layers: Layers, num_tokens: int) -> dict[str, object]:
    """Time tilings of both products and print the best ones."""
    shape, x = layers.shape, layers.rows(num_tokens)
    choices = [router(x) for router in layers.routers]
    inner = random(num_tokens * shape.num_chosen, shape.inner)
    per_expert = num_tokens * shape.num_chosen / shape.num_experts
    sorts = [sort_pairs(choice.experts, shape.num_experts) for choice in choices]

    products = expert_kernels(layers.experts[0].down, "grouped")
    few_products = expert_kernels(layers.experts[0].down, "few")

    def grouped(i: int, tiling: GroupedTiling, is_gated: bool) -> Tensor:
        slots = row_slots(num_tokens, per_expert, tiling.rows)
        by, experts = SortedPairs(*sorts[i], shape.num_chosen, slots), layers.experts[i]
        if is_gated:
            return products.gate_up_rows(x, experts.gate_up, by, experts.activation, tiling)
        return products.down_rows(inner, experts.down, by, tiling)

    def few(i: int, tiling: Tiling, is_gated: bool) -> Tensor:
        choice, experts = choices[i], layers.experts[i]
        if is_gated:
            return few_products.few_gate_up(x, experts.gate_up, choice.experts, experts.activation, tiling)
        return few_products.few_down(inner, experts.down, *choice, None, tiling)

    best: dict[str, object] = {"tokens": num_tokens}
    for is_gated in (True, False):
        runs: dict[object, Callable[[int], Tensor]] = {}
        if num_tokens <= 4:
            for tiling in few_candidates(is_gated=is_gated, is_mxfp4=shape.is_mxfp4):
                runs[tiling] = partial(few, tiling=tiling, is_gated=is_gated)
        else:
            for tiling in grouped_candidates(per_expert, is_gated=is_gated, is_mxfp4=shape.is_mxfp4):
                runs[tiling] = partial(grouped, tiling=tiling, is_gated=is_gated)
        compile_kernels(lambda runs=runs: run_once(runs.values()), lambda done, number: None)
        ranked = sorted((round(layers.microseconds(run), 1), str(tiling)) for tiling, run in runs.items())
        name = "gate_up" if is_gated else "down"
        print(f"{num_tokens} tokens, {name}:", flush=True)
        for us, tiling in ranked[:7]:
            print(f"    {us:8.1f}  {tiling}", flush=True)
        best[name] = ranked[:5]
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=_TOKENS)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    bandwidth, flops = copy_rate(), matrix_rate()
    results: dict[str, object] = {"copy_bytes_per_s": bandwidth, "matrix_flops": flops}
    for model in arguments.models:
        torch.manual_seed(0)
        layers = Layers(MODELS[model])
        if arguments.sweep:
            results[model] = [sweep(layers, num_tokens) for num_tokens in arguments.tokens]
            continue
        rows = [measure(layers, num_tokens, bandwidth, flops) for num_tokens in arguments.tokens]
        header = list(dict.fromkeys(name for row in rows for name in row))
        print(model)
        print(table(header, [[row.get(name, "") for name in header] for row in rows]))
        results[model] = rows
    publish("gpu_moe", {"results": results}, arguments)


if __name__ == "__main__":
    main()
