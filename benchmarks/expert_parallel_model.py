"""Expert parallelism on paper: how unevenly whole experts divide a step's work over ranks.

    python benchmarks/expert_parallel_model.py

Slices of every expert divide it evenly. Whole experts do not: a step takes as long as its busiest rank. Each
of T tokens takes k of E experts at random, all of them equally often, and each of n ranks holds E / n.

    reading     experts of the busiest rank that a token takes, over 1 / n of all that are taken
    products    pairs of a token and an expert of the busiest rank, over 1 / n of all pairs

Means of some thousand random steps. Decoding is bound by reading, long prompts by products. Needs no GPU.
"""

from dataclasses import dataclass

import torch
from support.common import table

RANKS, TOKENS, NUM_STEPS = (2, 4, 8), (1, 4, 16, 64, 256, 4096), 2000


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer, and of a token."""

    name: str
    num_experts: int
    num_chosen: int


MIXTURES = (Mixture("Qwen3-30B-A3B", 128, 8), Mixture("gpt-oss-20b", 32, 4), Mixture("Mixtral", 8, 2))


def unevenness(mixture: Mixture, num_tokens: int) -> list[tuple[float, float]]:
    """Return the busiest rank's work over the mean rank's, of reading and of products, for each of RANKS."""
    generator = torch.Generator().manual_seed(0)
    num_steps = max(20, NUM_STEPS // num_tokens)
    logits = torch.rand(num_steps, num_tokens, mixture.num_experts, generator=generator)
    chosen = logits.topk(mixture.num_chosen).indices.flatten(1)
    pairs = torch.zeros(num_steps, mixture.num_experts).scatter_add_(1, chosen, torch.ones(chosen.shape))
    found = []
    for num_ranks in RANKS:
        works = (each.unflatten(1, (num_ranks, -1)).sum(2) for each in ((pairs > 0).float(), pairs))
        reading, products = (float((work.amax(1) / work.mean(1)).mean()) for work in works)
        found.append((reading, products))
    return found


def report() -> str:
    """Return the table of docs/scaling.md: reading bounds steps to 64 tokens, products bound longer ones."""
    rows = []
    for mixture in MIXTURES:
        by_tokens = [
            [pair[num_tokens > 64] for pair in unevenness(mixture, num_tokens)] for num_tokens in TOKENS
        ]
        for ranks, cells in zip(RANKS, zip(*by_tokens, strict=True), strict=True):
            rows.append([mixture.name, ranks, *(f"{cell:.2f}" for cell in cells)])
    return table(["mixture", "ranks", *(f"{tokens:,}" for tokens in TOKENS)], rows)


if __name__ == "__main__":
    print(report())
