"""Sampling at the ends of every parameter's range: a token, never a NaN, never one of probability 0."""

import itertools
import math

import pytest
import torch
from fewer import fewer
from test_sampler import draw, request

from octavo.engine.sampling.sampler import Sampler

VOCAB = 3000
LARGEST = torch.finfo(torch.float32).max


def make_logits() -> dict[str, torch.Tensor]:
    normal = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 3
    forbidden = torch.full((VOCAB,), -torch.inf)
    forbidden[[17, 1029]] = torch.tensor([-50.0, -51.0])
    one = torch.full((VOCAB,), -torch.inf)
    one[5] = -LARGEST
    peak = torch.full((VOCAB,), -LARGEST)
    peak[[40, 41]] = LARGEST
    return {
        "normal": normal,
        "huge": normal * 1e37,
        "tiny": normal * 1e-37,
        "equal": torch.full((VOCAB,), 2.0),
        "forbidden": forbidden,
        "one": one,
        "peak": peak,
    }


LOGITS = make_logits()
TEMPERATURES = [0.0, 5e-324, 1e-38, 1e-10, 1e-5, 1.0, 100.0]
FILTERS: list[dict[str, float]] = [
    {},
    {"top_p": 5e-324},
    {"top_p": 1e-46},
    {"top_p": 1e-30},
    {"top_p": 1 - 1e-16},
    {"top_k": 1},
    {"top_k": 2**31 - 1},
    {"top_k": 2**31 - 1, "top_p": 1e-46},
    {"min_p": 1.0},
    {"min_p": 1e-46},
    {"min_p": 1.0, "top_k": 3, "top_p": 1e-46},
]


def possible_tokens(logits: torch.Tensor, temperature: float, **filters: float) -> set[int]:
    """Tokens that may be drawn, in float64; the most likely alone where a filter leaves but them."""
    if temperature < 1e-5:
        return set((logits == logits.max()).nonzero()[:, 0].tolist())
    scaled = (logits.double() - logits.max().double()) / temperature
    only_best = filters.get("top_p", 1.0) <= 1e-30 or filters.get("top_k") == 1 or filters.get("min_p") == 1
    # Ratios of probabilities that float32 tells from 1, and from 0.
    least = -(2.0**-22) if only_best else math.log(2.0**-149)
    return set((scaled >= least).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_token_that_is_drawn_is_a_possible_one(kind: str, filters: dict[str, float]) -> None:
    logits = LOGITS[kind]
    for temperature in TEMPERATURES:
        requests = [request(seed=seed, temperature=temperature, **filters) for seed in range(8)]
        sampler = Sampler(VOCAB, torch.device("cpu"))
        sampled = draw(sampler, logits.expand(8, -1), *requests)
        assert all(token.error is None for token in sampled)
        drawn = {token.token_id for token in sampled}
        assert drawn <= possible_tokens(logits, temperature, **filters), (temperature, drawn)


PENALTIES: list[dict[str, object]] = [
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 100.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 1e-38},
    {"logit_bias": {5: 100.0, 6: -100.0, 17: 100.0}},
    {"logit_bias": {17: -100.0}, "repetition_penalty": 1e-38},
]


@fewer(("kind", "penalties"), [*itertools.product(LOGITS, PENALTIES)])
def test_penalties_make_no_infinity_and_allow_nothing_that_is_forbidden(
    kind: str, penalties: dict[str, object]
) -> None:
    logits = LOGITS[kind]
    allowed = set(logits.isfinite().nonzero()[:, 0].tolist())
    for temperature, filters in itertools.product(TEMPERATURES, FILTERS):
        asked = request(
            [5, 17, 40], [41, 41, 17], temperature=temperature, logprobs=3, **penalties, **filters
        )
        token = draw(Sampler(VOCAB, torch.device("cpu")), logits[None], asked)[0]
        assert token.error is None
        assert token.token_id in allowed
        assert token.top is not None
        assert not any(math.isnan(logprob) for _, logprob, _ in token.top)


def test_penalties_do_not_hide_logits_that_are_not_finite() -> None:
    for bad in (math.nan, math.inf):
        logits = torch.zeros(1, VOCAB)
        logits[0, 5] = bad
        asked = request([5], repetition_penalty=1.3, temperature=0)
        assert draw(Sampler(VOCAB, torch.device("cpu")), logits, asked)[0].error is not None
