"""Sampling on a GPU at the ends of every parameter's range: as on a CPU, a token that is possible."""

import itertools

import pytest
import torch
from test_sampler import request
from test_sampler_extremes import LOGITS, possible_tokens
from triton_sampling_cases import everywhere, ignores_infinities

from octavo.engine.gpu.device_rows import SamplingRows

pytestmark = [
    *ignores_infinities,
    pytest.mark.filterwarnings("ignore:overflow encountered in subtract:RuntimeWarning"),
]

TEMPERATURES = [1e-38, 1e-5, 1.0]
FILTERS: list[dict[str, float]] = [
    {"top_p": 5e-324},
    {"top_p": 1 - 1e-16},
    {"top_k": 2**31 - 1, "top_p": 1e-46},
    {"min_p": 1.0},
    {"min_p": 1e-46},
]


@everywhere
@pytest.mark.parametrize("kind", ["huge", "tiny", "forbidden", "one", "peak"])
def test_a_token_that_is_drawn_is_a_possible_one(device: str, kind: str) -> None:
    from octavo.engine.sampling.triton_sampler import sample_tokens

    cases = list(itertools.product(TEMPERATURES, FILTERS))
    requests = [
        request(seed=seed, temperature=temperature, **filters)
        for seed, (temperature, filters) in enumerate(cases)
    ]
    rows = SamplingRows(len(cases), torch.device(device))
    rows.write(torch.arange(len(cases), device=device), requests)
    temperatures, seeds, positions, *chosen = rows.columns
    logits = LOGITS[kind].to(device).expand(len(cases), -1)
    tokens, is_finite = sample_tokens(logits, temperatures, seeds, positions, chosen)
    assert is_finite.all()
    for token, (temperature, filters) in zip(tokens.tolist(), cases, strict=True):
        assert token in possible_tokens(LOGITS[kind], temperature, **filters), (temperature, filters)
