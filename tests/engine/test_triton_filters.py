"""Top-k, top-p and min-p on a GPU against a sort in float64."""

from itertools import product

import pytest
import torch
from fewer import fewer
from torch import Tensor
from triton_sampling_cases import (
    INTERPRETED,
    NUM_DRAWS,
    chi_square,
    everywhere,
    gumbel_noise,
    ignores_infinities,
    in_all_dtypes,
    random_logits,
    sample,
)

pytestmark = ignores_infinities


def kept_tokens(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The oracle: sort in float64, keep the ties of every cut."""
    logits = row.double().cpu()
    probabilities = (logits / temperature).softmax(-1)
    kept = probabilities >= torch.tensor(min_p, dtype=torch.float32).double() * probabilities.max()
    if top_k > 0:
        kept &= logits >= logits.sort(descending=True).values[min(top_k, len(logits)) - 1]
    if top_p < 1:
        probabilities = probabilities * kept
        values, order = probabilities.sort(descending=True)
        reached = values.cumsum(0) >= torch.tensor(top_p, dtype=torch.float32).double() * values.sum()
        kept &= logits >= logits[order[int(reached.int().argmax())]]
    return set(kept.nonzero()[:, 0].tolist())


@everywhere
def test_filtered_frequencies(device: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0]).to(device)
    drawn = sample(logits.expand(NUM_DRAWS // 4, -1).contiguous(), 1.5, top_k=3)[0]
    kept = torch.tensor([float("-inf"), 1.0, 2.0, 0.5, float("-inf")])
    # 2 degrees of freedom: 13.8 is exceeded once in a thousand.
    assert chi_square(drawn, (kept / 1.5).softmax(-1)) < 13.8


@everywhere
def test_rows_without_filters_ignore_their_neighbours_filters(device: str) -> None:
    logits = random_logits(6, 3000, device, torch.float32)
    plain = sample(logits)[0]
    mixed = sample(logits, top_k=[0, 1, 0, 0, 0, -1], top_p=[1, 1, 1, 0.01, 1, 1], min_p=[0, 0, 0, 0, 1, 0])[
        0
    ]
    best = logits.argmax(-1).tolist()
    assert mixed == [plain[0], best[1], plain[2], best[3], best[4], plain[5]]


FILTERS = [
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.7, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 0, 0.8, 0.001),
    (1.0, 3, 0.9, 0.2),
    (1.0, 3000, 0.99, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.3, 200, 0.7, 1e-4),
]


@everywhere
@in_all_dtypes
@fewer(("options", "shape"), [*product(FILTERS, [(2, 3001, 3.0), (1, 9000, 0.1)])], every=3)
def test_filters_draw_what_the_oracle_draws(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, float],
    options: tuple[float, int, float, float],
) -> None:
    """Few candidates, and (9000 nearly equal logits) more than fit."""
    num_rows, vocab_size, scale = shape
    logits = random_logits(num_rows, vocab_size, device, dtype, scale)
    noise = gumbel_noise(list(range(num_rows)), 5, vocab_size, device)
    temperature, top_k, top_p, min_p = options
    expected = []
    for row, row_noise in zip(logits, noise, strict=True):
        kept = kept_tokens(row, *options)
        scores = row.double().cpu() / temperature + row_noise
        expected.append(max(kept, key=lambda token: scores[token].item()))
    assert sample(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)[0] == expected


only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="only interpreted kernels can be listened to")


def assert_kept_as_by_a_sort(
    logits: Tensor, options: tuple[float, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the cut that one row [1, V] is drawn with, overheard, with the oracle's."""
    import triton.language as tl

    from octavo.engine.sampling import triton_filters

    cuts: list[float] = []

    def listen(source, ids, length, cut, *rest):
        cuts.append(cut.handle.data.item())
        return tl.full([], 0, tl.int32)

    monkeypatch.setattr(triton_filters, "draw_above", listen)
    temperature, top_k, top_p, min_p = options
    sample(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    [cut] = cuts
    kept = set((logits[0].double() >= cut).nonzero()[:, 0].tolist())
    assert kept == kept_tokens(logits[0], *options)


@only_interpreted
@in_all_dtypes
@fewer(("options", "shape"), [*product(FILTERS, [(1, 1.0), (7, 1.0), (8193, 0.1), (10241, 2.5)])], every=3)
def test_filters_keep_exactly_what_a_sort_keeps(
    dtype: torch.dtype,
    shape: tuple[int, float],
    options: tuple[float, int, float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab_size, scale = shape
    assert_kept_as_by_a_sort(random_logits(1, vocab_size, "cpu", dtype, scale), options, monkeypatch)


@only_interpreted
@pytest.mark.parametrize("options", [(1.0, 0, 0.9, 0.0), (1.0, 8193, 0.9, 0.0), (1.0, 0, 0.9, 1e-7)])
def test_tokens_too_unlikely_to_be_kept_still_count_for_top_p(
    options: tuple[float, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of tokens below the floor that top-p alone would set hold 3 % of the mass."""
    logits = torch.full((1, 8193), -12.4)
    logits[0, 0] = 0.0
    logits[0, 1:101] = torch.linspace(-5.9, -5.7, 100)
    assert_kept_as_by_a_sort(logits, options, monkeypatch)
