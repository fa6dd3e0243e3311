"""Sampling on a GPU: greedy, draws and their noise, bad rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_sampling_cases import (
    HAS_GPU,
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

from octavo.errors import InvalidArgumentError

pytestmark = ignores_infinities
SIZES = [(3, 1), (3, 7), (3, 2048), (3, 8191), (3, 8192), (3, 8193), (2, 49152), (1, 151936)]


@pytest.mark.skipif(INTERPRETED or HAS_GPU, reason="the other tests of these files run in this process")
def test_all_sampling_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    files = [str(path) for path in Path(__file__).parent.glob("test_triton_*.py")]
    marks = ["-m", pytestconfig.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@everywhere
@in_all_dtypes
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_greedy_is_argmax(device: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = random_logits(num_rows, vocab_size, device, dtype)
    tokens, finite = sample(logits, 0.0)
    # Of equal logits, which half precision has many of, the lowest id.
    lowest = [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    assert tokens == lowest
    assert finite == [True] * num_rows


@everywhere
def test_greedy_ties_go_to_the_lowest_id(device: str) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[1, [4999, 2048, 2047]] = 1.0
    logits[2, [4999, 4096]] = 1.0
    assert sample(logits, 0.0)[0] == [0, 2047, 4096]


@everywhere
@pytest.mark.parametrize("vocab_size", [1, 7, 8191, 8193])
def test_the_tail_of_the_last_tile_never_wins(device: str, vocab_size: int) -> None:
    """All logits far below zero: padding with 0, or with a finite number, would win."""
    logits = random_logits(4, vocab_size, device, torch.float32) * 0 - 3e38
    for temperature in (0.0, 1.0, 100.0):
        assert all(token < vocab_size for token in sample(logits, temperature)[0])
        assert all(token < vocab_size for token in sample(logits, temperature, top_k=3, top_p=0.9)[0])


@everywhere
def test_frequencies_follow_the_softmax(device: str) -> None:
    logits = torch.tensor([0.5, -0.5, 2.0, 0.0, 1.0, -0.75, 1.5, 0.25]).to(device, torch.float16)
    drawn = sample(logits.expand(NUM_DRAWS, -1).contiguous(), 0.8)[0]
    # 7 degrees of freedom: 24.3 is exceeded once in a thousand.
    assert chi_square(drawn, (logits.float().cpu() / 0.8).softmax(-1)) < 24.3


@everywhere
def test_frequencies_over_several_tiles(device: str) -> None:
    """A tile is drawn first, then a token in it; one tile is empty, one holds a single token."""
    logits = torch.full((1, 7000), float("-inf"))
    ids = [3, 2047, 2048, 2100, 6500]
    logits[0, ids] = torch.tensor([0.0, 1.0, 0.5, -1.0, 1.2])
    drawn = sample(logits.to(device).expand(NUM_DRAWS, -1).contiguous())[0]
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand.
    assert chi_square(drawn, logits[0].softmax(-1)) < 18.5


@everywhere
def test_gumbel_noise_has_the_right_tails(device: str) -> None:
    """The largest of many draws sits where it should: small exponentials keep their precision."""
    noise = gumbel_noise([11], 7, 2**17, device)[0]
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(1.6449, abs=0.03)
    uniform = (-(-noise).exp()).exp().sort().values
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    steps = torch.arange(1, 2**17 + 1, dtype=torch.float64) / 2**17
    assert (uniform - steps).abs().max() < 1.95 / 2**8.5
    assert 9 < noise.max() < 22


@everywhere
def test_a_row_draws_the_same_alone_and_in_any_batch(device: str) -> None:
    logits = random_logits(9, 5000, device, torch.float32)
    options = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 0.0, 2.0, 1.0, 0.5, 1.0],
        "seeds": [0, 1, 2**63 - 1, 7, 7, 7, 2**32, 2**31, 2**33],
        "positions": [0, 5, 2**31 - 1, 1, 2, 3, 4, 5, 6],
        "top_k": [0, 0, 20, 0, 5, 0, 700, 1, 0],
        "top_p": [1.0, 1.0, 0.9, 0.8, 0.5, 1.0, 1.0, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.02, 0.0, 0.0, 0.0],
    }
    together = sample(logits, **options)[0]
    alone = [
        sample(logits[i : i + 1], **{key: values[i : i + 1] for key, values in options.items()})[0][0]
        for i in range(9)
    ]
    assert together == alone
    backwards = sample(logits.flip(0), **{key: values[::-1] for key, values in options.items()})[0]
    assert backwards[::-1] == together


@everywhere
def test_every_part_of_the_key_matters(device: str) -> None:
    logits = torch.zeros(24, 4000, device=device)
    same = {"seeds": [3] * 24, "positions": [9] * 24}
    assert len(set(sample(logits, **same)[0])) == 1
    for part, values in (
        ("seeds", list(range(24))),
        ("seeds", [2**32 * i for i in range(24)]),
        ("positions", list(range(24))),
    ):
        assert len(set(sample(logits, **{**same, part: values})[0])) > 20


@everywhere
@in_all_dtypes
def test_bad_rows_are_flagged_and_fail_alone(device: str, dtype: torch.dtype) -> None:
    logits = random_logits(8, 5000, device, dtype).contiguous()
    logits[1, 4321] = float("nan")
    logits[3, 17] = float("inf")
    logits[5] = float("-inf")
    logits[6, :4999] = float("-inf")
    logits[7] = float("nan")
    for temperature in (0.0, 1.0):
        tokens, finite = sample(logits, temperature, top_p=0.9)
        assert finite == [True, False, True, False, True, False, True, False]
        assert tokens == [token if good else 0 for token, good in zip(tokens, finite, strict=True)]
        assert tokens[6] == 4999
        untouched = sample(logits[[0, 2, 4]], temperature, [0, 2, 4], top_p=0.9)[0]
        assert [tokens[0], tokens[2], tokens[4]] == untouched


@everywhere
def test_forbidden_tokens_are_never_drawn(device: str) -> None:
    logits = torch.full((12, 4100), float("-inf"), device=device)
    logits[:, [5, 4099]] = torch.tensor([-50.0, -51.0], device=device)
    for options in ({}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 1e-6}):
        assert set(sample(logits, **options)[0]) == {5, 4099}


@everywhere
def test_tiny_and_huge_temperatures(device: str) -> None:
    logits = random_logits(4, 3000, device, torch.float32)
    best = logits.argmax(-1).tolist()
    for temperature in (1e-45, 1e-6):
        assert sample(logits, temperature)[0] == best
        assert sample(logits, temperature, top_p=0.9)[0] == best
    assert sample(logits * 1e35, 1e-6)[0] == best
    assert all(0 <= token < 3000 for token in sample(logits, 100.0)[0])


@everywhere
@in_all_dtypes
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_draws_are_the_oracles(device: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    from octavo.engine.sampling.triton_filters import TILE

    logits = random_logits(num_rows, vocab_size, device, dtype)
    seeds = list(range(num_rows))
    num_tiles = -(-vocab_size // TILE)
    padded = torch.nn.functional.pad(
        logits.double().cpu() / 0.8, (0, num_tiles * TILE - vocab_size), value=float("-inf")
    )
    tiles = padded.unflatten(1, (num_tiles, TILE))
    chosen = (tiles.logsumexp(-1) + gumbel_noise(seeds, 5, num_tiles, device, of_tiles=True)).argmax(-1)
    scores = padded + gumbel_noise(seeds, 5, num_tiles * TILE, device)
    inside = scores.unflatten(1, (num_tiles, TILE))[torch.arange(num_rows), chosen]
    expected = (chosen * TILE + inside.argmax(-1)).tolist()
    assert sample(logits, 0.8) == (expected, [True] * num_rows)


@everywhere
def test_sampling_refuses_what_does_not_fit(device: str) -> None:
    logits = torch.zeros(2, 10, device=device)
    for bad in (logits[0], logits.t(), logits[:, :0]):
        with pytest.raises(InvalidArgumentError, match="logits must be"):
            sample(bad)
    with pytest.raises(InvalidArgumentError, match="temperatures must be"):
        sample(logits, [1.0])
    with pytest.raises(InvalidArgumentError, match="filter top_k must be"):
        sample(logits, top_k=[1])
    assert sample(logits[:0], with_filters=True) == ([], [])
