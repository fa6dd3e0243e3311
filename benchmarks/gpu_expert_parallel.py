"""A rank's experts of one layer on one GPU: slices of all of them, or some of them whole.

    python benchmarks/gpu_expert_parallel.py [--models 30b-a3b ...] [--ranks 2 ...] [--tokens 1 ...]

No GPUs talk to one another: both ways end in the same sum over ranks. Of n ranks with whole experts each has
its turn, with the choices of the same tokens; `busiest` is the slowest of them, which a step waits for.
Random weights and rows, so tokens spread nearly evenly. What that means on paper: expert_parallel_model.py.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpu_moe import MODELS, Shape, random, random_experts
from support.common import make_parser, publish, table
from support.gpu_timing import graph_seconds

from octavo.gemm.expert_choice import Choice
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.router import Router
from octavo.parallel import TensorParallel, shard_whole

_TOKENS = [1, 4, 16, 64, 256, 1024, 4096]
_NUM_COPIES = 3


@dataclass(frozen=True, slots=True)
class Share:
    """Copies of a rank's experts, both ways; all ranks with whole experts have the same numbers."""

    slices: Sequence[StackedExperts]
    whole: Sequence[StackedExperts]


def make(shape: Shape, num_ranks: int) -> Share:
    """Return a rank's part of a layer."""
    # Blocks of 32 columns are not cut, so some rank may have a few columns more.
    slices = replace(shape, inner=-(-shape.inner // num_ranks // 32) * 32)
    whole = replace(shape, num_experts=shape.num_experts // num_ranks)
    elsewhere = shape.num_experts - whole.num_experts
    return Share(
        [random_experts(slices) for _ in range(_NUM_COPIES)],
        [replace(random_experts(whole), num_elsewhere=elsewhere) for _ in range(_NUM_COPIES)],
    )


def microseconds(layers: Sequence[StackedExperts], x: torch.Tensor, choices: Sequence[Choice]) -> float:
    """Time a layer, copies in turn."""
    turn = itertools.cycle(range(len(layers)))

    def call() -> None:
        copy = next(turn)
        layers[copy](x, choices[copy])

    return graph_seconds(call, 2 * len(layers), 5) * 1e6


def measure(shape: Shape, experts: Share, num_ranks: int, num_tokens: int) -> dict[str, object]:
    """Time both ways for one number of tokens."""
    x = random(num_tokens, shape.hidden) * 50
    weights = [random(shape.num_experts, shape.hidden) for _ in range(_NUM_COPIES)]

    def choices(held: range | None) -> list[Choice]:
        return [Router(w, shape.num_chosen, renormalises=True, held=held)(x) for w in weights]

    ranks = [TensorParallel.not_met(rank, num_ranks) for rank in range(num_ranks)]
    whole = [
        microseconds(experts.whole, x, choices(shard_whole(shape.num_experts, rank, what="experts")))
        for rank in ranks
    ]
    slices = microseconds(experts.slices, x, choices(None))
    return {
        "tokens": num_tokens,
        "slices_us": round(slices, 1),
        "busiest_us": round(max(whole), 1),
        "mean_us": round(sum(whole) / num_ranks, 1),
        "slices / busiest": round(slices / max(whole), 2),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["30b-a3b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=_TOKENS)
    arguments = parser.parse_args()
    results: dict[str, object] = {}
    for model, num_ranks in itertools.product(arguments.models, arguments.ranks):
        torch.manual_seed(0)
        shape = MODELS[model]
        experts = make(shape, num_ranks)
        rows = [measure(shape, experts, num_ranks, num_tokens) for num_tokens in arguments.tokens]
        print(f"{model}, one of {num_ranks} ranks")
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        results[f"{model} / {num_ranks}"] = rows
    publish("gpu_expert_parallel", {"results": results}, arguments)


if __name__ == "__main__":
    main()
