"""Draws tokens from logits in PyTorch: temperature, filters, and one random number per row.

Random numbers are made by counter: each depends on a seed and a position, and on nothing else.
"""

import torch
from torch import Tensor

from octavo.engine.request import Request

_MASK64 = 2**64 - 1


def counter_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends on (seed, position) only.

    Source: splitmix64 finaliser (Steele, Lea and Flood, 2014), applied to the mixed pair.
    """
    # 48 bits: a product with the total mass then stays below it in float64.
    return (mix_seed(mix_seed(seed, 0), position) >> 16) / 2**48


def mix_seed(seed: int, stream: int) -> int:
    """Derive an independent 64-bit seed for a stream (a completion's index, a position)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


# Top-p looks at this many of the most likely tokens before it sorts all: its sets are nearly always smaller.
_NUM_CANDIDATES = 1024


def draw(logits: Tensor, largest: Tensor, requests: list[Request]) -> list[int]:
    """Draw one token per row by temperature, min-p, top-k, top-p and inverse CDF.

    Args:
        logits: [R, V] float32.
        largest: [R], each row's largest logit, finite.
        requests: R requests, none greedy.
    """
    device = logits.device
    temperatures = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32, device=device)
    # Differences from the largest one overflow to -inf, a probability of 0; quotients would overflow to inf.
    logits = (logits - largest[:, None]).div_(temperatures[:, None])
    uniforms = [counter_uniform(r.seed, r.num_output_tokens) for r in requests]
    probabilities = logits.softmax(-1)
    for row, request in enumerate(requests):
        _filter(probabilities[row], request)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    # right=True skips zero-probability tokens that stand exactly at the target.
    return (
        torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1).tolist()
    )


def _filter(probabilities: Tensor, request: Request) -> None:
    """Zero the probabilities [V] that min-p, top-k or top-p drop, in place, if any is set."""
    params = request.params
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if params.top_k > 0 or params.top_p < 1:
        ids, kept = _most_likely(probabilities, params.top_k, params.top_p)
        probabilities.zero_()
        probabilities[ids] = kept


def _most_likely(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (ids, probabilities) of the top-k tokens cut to the smallest set reaching top_p of their mass.

    A full sort is only needed when the candidates looked at first do not reach top_p.
    """
    vocab_size = probabilities.shape[0]
    limit = min(top_k, vocab_size) if top_k > 0 else vocab_size
    total = probabilities.sum()
    for num in (limit,) if top_k > 0 else (min(limit, _NUM_CANDIDATES), limit):
        values, ids = probabilities.topk(num)
        mass = values.sum() if top_k > 0 else total
        before = values.cumsum(0) - values
        # A top_p that float32 rounds to 0 keeps one token as well.
        keep = max(1, int((before < top_p * mass).sum()))
        if keep < num or num == limit:
            return ids[:keep], values[:keep]
    raise AssertionError("the full vocabulary always reaches top_p")
