"""Sampling and the decode step's advance on a GPU, else in Triton's interpreter.

The interpreter has to be chosen before triton is first imported, so without a GPU one test runs this file
again in a process of its own. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/engine/test_triton_sampler.py
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
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

if INTERPRETED or HAS_GPU:
    # Nowhere else may triton be imported: it would be too late for other files to choose the interpreter.
    import triton
    import triton.language as tl

    from octavo.engine.triton_random import TILE_STREAM, TOKEN_STREAM, gumbel

    @triton.jit
    def gumbel_kernel(out_ptr, seeds_ptr, position, STREAM: tl.constexpr, SIZE: tl.constexpr):
        index = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        row_at = out_ptr + (tl.program_id(0) * tl.num_programs(1)) * SIZE
        tl.store(row_at + index, gumbel(tl.load(seeds_ptr + tl.program_id(0)), position, index, STREAM))

    def gumbel_noise(
        seeds: list[int], position: int, size: int, device: str, *, of_tiles: bool = False
    ) -> Tensor:
        """[len(seeds), size] float64 noise of tokens, or of tiles."""
        block = min(triton.next_power_of_2(size), 2**16)
        num_blocks = triton.cdiv(size, block)
        noise = torch.empty(len(seeds), num_blocks * block, device=device)
        stream = TILE_STREAM if of_tiles else TOKEN_STREAM
        gumbel_kernel[(len(seeds), num_blocks)](
            noise, torch.tensor(seeds, device=device), position, STREAM=stream, SIZE=block
        )
        return noise[:, :size].double().cpu()


@pytest.mark.skipif(INTERPRETED or HAS_GPU, reason="this file's other tests run in this process")
def test_all_sampling_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def random_logits(
    num_rows: int, vocab_size: int, device: str, dtype: torch.dtype, scale: float = 3.0
) -> Tensor:
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
def test_rows_without_filters_ignore_their_neighbours_filters(device: str) -> None:
    logits = random_logits(6, 3000, device, torch.float32)
    plain = sample(logits)[0]
    mixed = sample(logits, top_k=[0, 1, 0, 0, 0, -1], top_p=[1, 1, 1, 0.01, 1, 1], min_p=[0, 0, 0, 0, 1, 0])[
        0
    ]
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


@everywhere
@in_all_dtypes
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize(("num_rows", "vocab_size", "scale"), [(2, 7, 1.0), (2, 3001, 3.0), (1, 9000, 0.1)])
def test_filters_draw_what_the_oracle_draws(
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    vocab_size: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Few candidates, and (9000 nearly equal logits) more than fit."""
    logits = random_logits(num_rows, vocab_size, device, dtype, scale)
    noise = gumbel_noise(list(range(num_rows)), 5, vocab_size, device)
    expected = []
    for row, row_noise in zip(logits, noise, strict=True):
        kept = kept_tokens(row, temperature, top_k, top_p, min_p)
        scores = row.double().cpu() / temperature + row_noise
        expected.append(max(kept, key=lambda token: scores[token].item()))
    assert sample(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)[0] == expected


@pytest.mark.skipif(not INTERPRETED, reason="only interpreted kernels can be listened to")
@in_all_dtypes
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1, 1.0), (7, 1.0), (3001, 3.0), (8193, 0.1), (49152, 2.5)]
)
def test_filters_keep_exactly_what_a_sort_keeps(
    dtype: torch.dtype,
    vocab_size: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.engine import triton_filters

    cuts: list[float] = []

    def listen(source, ids, length, cut, *rest):
        cuts.append(cut.handle.data.item())
        return tl.full([], 0, tl.int32)

    monkeypatch.setattr(triton_filters, "draw_above", listen)
    logits = random_logits(1, vocab_size, "cpu", dtype, scale)
    sample(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p, with_filters=True)
    [cut] = cuts
    kept = set((logits[0].double() >= cut).nonzero()[:, 0].tolist())
    assert kept == kept_tokens(logits[0], temperature, top_k, top_p, min_p)


@everywhere
@in_all_dtypes
@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_draws_are_the_oracles(device: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    from octavo.engine.triton_filters import TILE

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
    with pytest.raises(InvalidArgumentError, match=r"filters\.top_k must be"):
        sample(logits, top_k=[1])
    assert sample(logits[:0], with_filters=True) == ([], [])


def advanced(
    device: str, slot_dtype: torch.dtype, seq_lens: list[int], sampled: list[int], *, spare: int = 0
) -> tuple[list[int], ...]:
    """Advance rows whose block tables are [10 r + 1, 10 r + 2, 10 r + 3], blocks of 4 tokens."""
    from octavo.engine.triton_step import advance_decode_step

    num_rows = len(seq_lens)
    size = num_rows + spare
    lens = torch.tensor(seq_lens + [9] * spare, dtype=torch.int32, device=device)
    positions = lens - 1
    input_ids = torch.full((size,), -7, dtype=torch.int32, device=device)
    slots = torch.full((size,), -7, dtype=slot_dtype, device=device)
    table = torch.arange(size, device=device, dtype=torch.int32)[:, None] * 10 + torch.arange(
        1, 6, device=device, dtype=torch.int32
    )
    sampled_ids = torch.tensor(sampled, dtype=torch.int32, device=device)
    advance_decode_step(sampled_ids, input_ids, positions, lens, slots, table[:, :3], 4)
    return input_ids.tolist(), positions.tolist(), lens.tolist(), slots.tolist()


@everywhere
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_advance_crosses_block_edges(device: str, slot_dtype: torch.dtype) -> None:
    """Trap: t % block_size == 0. Lengths B - 1, B, B + 1, 2 B of B = 4."""
    input_ids, positions, seq_lens, slots = advanced(device, slot_dtype, [3, 4, 5, 8], [50, 51, 52, 53])
    assert input_ids == [50, 51, 52, 53]
    assert positions == [3, 4, 5, 8]
    assert seq_lens == [4, 5, 6, 9]
    assert slots == [1 * 4 + 3, 12 * 4, 22 * 4 + 1, 33 * 4]


@everywhere
def test_dead_rows_stay_dead(device: str) -> None:
    """Trap: finished sequences that go on writing."""
    input_ids, positions, seq_lens, slots = advanced(device, torch.int64, [0, 6, 0], [50, 51, 52])
    assert input_ids == [-7, 51, -7]
    assert positions == [-1, 6, -1]
    assert seq_lens == [0, 7, 0]
    assert slots == [-1, 12 * 4 + 2, -1]


@everywhere
def test_advance_beyond_the_block_table_stores_nothing(device: str) -> None:
    assert advanced(device, torch.int64, [11, 12], [50, 51])[3] == [3 * 4 + 3, -1]


@everywhere
def test_advance_many_rows_and_no_others(device: str) -> None:
    input_ids, positions, seq_lens, slots = advanced(
        device, torch.int64, [6] * 300, list(range(300)), spare=3
    )
    assert input_ids == [*range(300), -7, -7, -7]
    assert positions == [6] * 300 + [8] * 3
    assert seq_lens == [7] * 300 + [9] * 3
    assert slots == [(10 * row + 2) * 4 + 2 for row in range(300)] + [-7] * 3


@everywhere
def test_advance_refuses_what_does_not_fit(device: str) -> None:
    from octavo.engine.triton_step import advance_decode_step

    short, long = (torch.zeros(size, dtype=torch.int32, device=device) for size in (2, 3))
    with pytest.raises(InvalidArgumentError, match="seq_lens must hold at least 3"):
        advance_decode_step(long, long, long, short, long, long[:, None], 4)
