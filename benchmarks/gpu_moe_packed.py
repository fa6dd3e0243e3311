"""A layer of experts packed in 4 bits on one GPU, beside the same in bfloat16 and beside its bound.

    python benchmarks/gpu_moe_packed.py [--models 30b-a3b mixtral] [--tokens 1 2 4 ... 4096] [--save MACHINE]
    python benchmarks/gpu_moe_packed.py --sweep [--models ...] [--tokens ...]

Random words, in groups of 128. A CUDA graph calls several copies of the layer in turn, more than the L2 cache
holds. The bound is that of the experts which the tokens touch: the bytes of their words and pairs at the
measured copy rate, or their operations at the measured matrix rate. Prints a table, then one line of JSON.
--sweep times tilings.
"""

import itertools
from collections.abc import Callable

import torch
from gpu_moe import MODELS, Layers, Shape
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from torch import Tensor
from triton.runtime.errors import OutOfResources

from octavo.layers.moe.packed import PackedExperts
from octavo.layers.moe.packed_weight import PackedExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import PackedTiling, row_slots
from octavo.layers.moe.triton.grouped import SortedPairs
from octavo.layers.moe.triton.packed import packed_down_rows, packed_gate_up_rows
from octavo.layers.moe.triton.sort import sort_pairs

_GROUP = 128
_TOKENS = [1, 4, 16, 32, 64, 128, 256, 1024, 4096]
_TILINGS = [
    PackedTiling(rows, columns, num_warps, num_stages)
    for rows in (16, 32, 64, 128)
    for columns in (32, 64, 128)
    for num_warps in (4, 8)
    for num_stages in (2, 3, 4)
    if rows * columns <= 128 * 64
]


def random_weight(num_experts: int, num_rows: int, size: int, parts: int) -> PackedExpertWeight:
    """Experts [E, N, K] of random integers, with scales and minimums that make numbers of about 0.02."""
    num_words = -(-size // 256) * 32
    words = torch.randint(-(2**31), 2**31 - 1, (num_experts, num_rows, num_words), device="cuda")
    halves = torch.tensor([0.004, -0.03], dtype=torch.float16, device="cuda")
    pairs = halves.view(torch.int32).expand(num_experts, num_words * 8 // _GROUP, num_rows).contiguous()
    factors = torch.ones(num_experts, parts, device="cuda")
    return PackedExpertWeight(4, size, _GROUP, words.int(), pairs, factors)


def random_experts(shape: Shape) -> PackedExperts:
    """One layer of a model."""
    return PackedExperts(
        random_weight(shape.num_experts, 2 * shape.inner, shape.hidden, 2),
        random_weight(shape.num_experts, shape.hidden, shape.inner, 1),
        "silu",
    )


def microseconds(experts: list[PackedExperts], call: Callable[[PackedExperts], object]) -> float:
    """Time a call of one copy."""
    turn = itertools.cycle(experts)
    return graph_seconds(lambda: call(next(turn)), 2 * len(experts), 7) * 1e6


def measure(
    layers: Layers, experts: list[PackedExperts], num_tokens: int, bandwidth: float, flops: float
) -> dict[str, object]:
    """Time a layer for one number of tokens."""
    shape, x = layers.shape, layers.rows(num_tokens)
    choice = layers.routers[0](x)
    touched = len(choice.experts.unique())
    products = 6 * shape.hidden * shape.inner * num_tokens * shape.num_chosen
    num_bytes = touched * shape.expert_bytes / 2 * (0.5 + 4 / _GROUP)
    bound = max(num_bytes / bandwidth, products / flops) * 1e6
    packed = microseconds(experts, lambda each: each(x, choice))
    plain = layers.microseconds(lambda i: layers.experts[i](x, choice))
    return {
        "tokens": num_tokens,
        "touched": touched,
        "bound_us": round(bound, 1),
        "packed_us": round(packed, 1),
        "bfloat16_us": round(plain, 1),
        "of_bound": round(bound / packed, 3),
    }


def sweep(layers: Layers, experts: list[PackedExperts], num_tokens: int) -> dict[str, object]:
    """Time tilings of both products and print the best ones."""
    shape, x = layers.shape, layers.rows(num_tokens)
    choice = layers.routers[0](x)
    per_expert = num_tokens * shape.num_chosen / shape.num_experts
    best: dict[str, object] = {"tokens": num_tokens}
    for name in ("gate_up", "down"):
        times: list[tuple[float, str]] = []
        for tiling in _TILINGS:
            call = _product(name, x, choice, tiling, per_expert, shape)
            try:
                times.append((round(microseconds(experts, call), 1), str(tiling)))
            except OutOfResources as error:
                print(f"    {tiling}: {error}", flush=True)
        times.sort()
        print(f"{num_tokens} tokens, {name}:", flush=True)
        for us, tiling_name in times[:6]:
            print(f"    {us:8.1f}  {tiling_name}", flush=True)
        best[name] = times[:5]
    return best


def _product(
    name: str, x: Tensor, choice: Choice, tiling: PackedTiling, per_expert: float, shape: Shape
) -> Callable[[PackedExperts], Tensor]:
    slots = row_slots(x.shape[0], per_expert, tiling.rows)
    by_expert = SortedPairs(*sort_pairs(choice.experts, shape.num_experts), shape.num_chosen, slots)
    if name == "gate_up":
        return lambda each: packed_gate_up_rows(x, each.gate_up, by_expert, each.activation, tiling)
    inner = x.new_empty(choice.experts.numel(), shape.inner).normal_()
    return lambda each: packed_down_rows(inner, each.down, by_expert, tiling)


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
        experts = [random_experts(MODELS[model]) for _ in range(4)]
        if arguments.sweep:
            results[model] = [sweep(layers, experts, num_tokens) for num_tokens in arguments.tokens]
            continue
        rows = [measure(layers, experts, number, bandwidth, flops) for number in arguments.tokens]
        header = list(rows[0])
        print(model)
        print(table(header, [[row[name] for name in header] for row in rows]))
        results[model] = rows
    publish("gpu_moe_packed", {"results": results}, arguments)


if __name__ == "__main__":
    main()
