"""Sampling and the decode step's advance on a GPU, else in Triton's interpreter.

The interpreter has to be chosen before triton is first imported, so without a GPU one test runs this file
again in a process of its own. By hand: TRITON_INTERPRET=1 python -m pytest tests/engine/test_triton_sampler.py
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
# The interpreter computes with NumPy, which warns where a GPU just returns an infinity that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=ON_GPU)]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
everywhere = pytest.mark.parametrize("device", DEVICES)
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES)

SIZES = [(3, 1), (3, 7), (3, 2048), (3, 8191), (3, 8192), (3, 8193), (2, 49152), (1, 151936)]


@pytest.mark.skipif(INTERPRETED or HAS_GPU, reason="this file's other tests run in this process")
def test_all_sampling_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def random_logits(num_rows: int, vocab_size: int, device: str, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    """Rows of a wider tensor whose other columns would win if they were looked at."""
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    logits = torch.full((num_rows, vocab_size + 5), 1e4)
    logits[:, :vocab_size] = torch.randn(num_rows, vocab_size, generator=generator) * scale
    return logits.to(device, dtype)[:, :vocab_size]


def sample(
    logits: Tensor,
    temperature: float | list[float] = 1.0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    *,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    with_filters: bool = False,
) -> tuple[list[int], list[bool]]:
    """Sample each row; scalars hold for all rows, seeds default to 0, 1, 2 .. and positions to 5."""
    from octavo.engine.triton_filters import SamplingFilters
    from octavo.engine.triton_sampler import sample_tokens

    num_rows = len(logits)

    def column(value: object, dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype, device=logits.device)

    filters = SamplingFilters(
        column(top_k, torch.int32), column(top_p, torch.float32), column(min_p, torch.float32)
    )
    asked = with_filters or (top_k, top_p, min_p) != (0, 1.0, 0.0)
    token_ids, is_finite = sample_tokens(
        logits,
        column(temperature, torch.float32),
        column(seeds or list(range(num_rows)), torch.int64),
        column(positions or 5, torch.int32),
        filters if asked else None,
    )
    assert token_ids.dtype == torch.int32
    return token_ids.tolist(), is_finite.tolist()


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


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    expected = probabilities.double() * len(drawn)
    observed = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    assert not observed[expected == 0].any()
    return float(((observed - expected).square() / expected)[expected > 0].sum())


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
@in_all_dtypes
def test_frequencies_follow_the_softmax(device: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -4.0, 1.5, 0.25]).to(device, dtype)
    drawn = sample(logits.expand(1500, -1).contiguous(), 0.8)[0]
    # 7 degrees of freedom: 24.3 is exceeded once in a thousand.
    assert chi_square(drawn, (logits.float().cpu() / 0.8).softmax(-1)) < 24.3


@everywhere
def test_frequencies_over_several_tiles(device: str) -> None:
    """A tile is drawn first, then a token in it; one tile is empty, one holds a single token."""
    logits = torch.full((1, 7000), float("-inf"))
    ids = [3, 2047, 2048, 2100, 6500]
    logits[0, ids] = torch.tensor([0.0, 1.0, 0.5, -1.0, 1.2])
    drawn = sample(logits.to(device).expand(1000, -1).contiguous())[0]
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand.
    assert chi_square(drawn, logits[0].softmax(-1)) < 18.5


@everywhere
def test_filtered_frequencies(device: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0]).to(device)
    drawn = sample(logits.expand(800, -1).contiguous(), 1.5, top_k=3)[0]
    kept = torch.tensor([float("-inf"), 1.0, 2.0, 0.5, float("-inf")])
    # 2 degrees of freedom: 13.8 is exceeded once in a thousand.
    assert chi_square(drawn, (kept / 1.5).softmax(-1)) < 13.8


@everywhere
def test_gumbel_noise_has_the_right_tails(device: str) -> None:
    """The largest of many draws sits where it should: small exponentials keep their precision."""
    import triton

    from octavo.engine.triton_random import TOKEN_STREAM, gumbel

    @triton.jit
    def fill(out, SIZE: triton.language.constexpr):
        index = triton.language.arange(0, SIZE)
        triton.language.store(out + index, gumbel(11, 7, index, TOKEN_STREAM))

    noise = torch.empty(2**17, device=device)
    fill[(1,)](noise, SIZE=2**17)
    noise = noise.double().cpu()
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
def test_rows_without_filters_ignore_their_neighbours_filters(device: str) -> None:
    logits = random_logits(6, 3000, device, torch.float32)
    plain = sample(logits)[0]
    mixed = sample(logits, top_k=[0, 1, 0, 0, 0, -1], top_p=[1, 1, 1, 0.01, 1, 1], min_p=[0, 0, 0, 0, 1, 0])[0]
    best = logits.argmax(-1).tolist()
    assert mixed == [plain[0], best[1], plain[2], best[3], best[4], plain[5]]


@everywhere
def test_every_part_of_the_key_matters(device: str) -> None:
    logits = torch.zeros(64, 4000, device=device)
    same = {"seeds": [3] * 64, "positions": [9] * 64}
    assert len(set(sample(logits, **same)[0])) == 1
    for part, values in (
        ("seeds", list(range(64))),
        ("seeds", [2**32 * i for i in range(64)]),
        ("positions", list(range(64))),
    ):
        assert len(set(sample(logits, **{**same, part: values})[0])) > 55


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
    logits = torch.full((200, 4100), float("-inf"), device=device)
    logits[:, [5, 4099]] = torch.tensor([-50.0, -51.0], device=device)
    for options in ({}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 1e-6}):
        assert set(sample(logits[:60], **options)[0]) == {5, 4099}


@everywhere
def test_tiny_and_huge_temperatures(device: str) -> None:
    logits = random_logits(4, 3000, device, torch.float32)
    best = logits.argmax(-1).tolist()
    for temperature in (1e-45, 1e-30, 1e-6):
        assert sample(logits, temperature)[0] == best
        assert sample(logits, temperature, top_p=0.9)[0] == best
    assert sample(logits * 1e35, 1e-6)[0] == best
    assert all(0 <= token < 3000 for token in sample(logits, 100.0)[0])


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


def found_cut(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> set[int]:
    """Which tokens row 0 keeps, read off the kernels' own cut by drawing from flattened logits.

    The kernel that draws is handed to a shim of itself which stores the cut instead.
    """
    raise NotImplementedError
