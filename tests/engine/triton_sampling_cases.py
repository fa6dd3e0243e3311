"""What the tests of sampling on a GPU share: where they run, logits, calls, and noise.

Natively on a GPU, else in Triton's interpreter, which has to be chosen before triton is first imported: in
a process of its own, that a test starts. By hand: TRITON_INTERPRET=1 python -m pytest tests/engine -k triton
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
# The interpreter computes with NumPy, which warns where a GPU just returns an infinity that is meant.
ignores_infinities = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning"),
]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=ON_GPU)]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
everywhere = pytest.mark.parametrize("device", DEVICES)
# Interpreted programs are a thousand times slower than real ones.
NUM_DRAWS = 200 if INTERPRETED else 20_000
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def gumbel_noise(
    seeds: list[int], position: int, size: int, device: str, *, of_tiles: bool = False
) -> Tensor:
    """[len(seeds), size] float64 noise of tokens, or of tiles."""
    # Nowhere else may triton be imported: it would be too late for other files to choose the interpreter.
    from triton_noise_kernel import BLOCK, noise_kernel

    num_blocks = -(-size // BLOCK)
    noise = torch.empty(len(seeds), num_blocks * BLOCK, device=device)
    noise_kernel[(len(seeds), num_blocks)](
        noise, torch.tensor(seeds, device=device), position, OF_TILES=of_tiles, SIZE=BLOCK
    )
    return noise[:, :size].double().cpu()


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
    from octavo.engine.sampling.triton_sampler import sample_tokens

    num_rows = len(logits)

    def column(value: object, dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype, device=logits.device)

    filters = [column(top_k, torch.int32), column(top_p, torch.float32), column(min_p, torch.float32)]
    asked = with_filters or (top_k, top_p, min_p) != (0, 1.0, 0.0)
    token_ids, is_finite = sample_tokens(
        logits,
        column(temperature, torch.float32),
        column(seeds or list(range(num_rows)), torch.int64),
        column(positions or 5, torch.int32),
        filters if asked else (),
    )
    assert token_ids.dtype == torch.int32
    return token_ids.tolist(), is_finite.tolist()


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    expected = probabilities.double() * len(drawn)
    observed = torch.bincount(torch.tensor(drawn), minlength=len(expected)).double()
    assert not observed[expected == 0].any()
    return float(((observed - expected).square() / expected)[expected > 0].sum())
