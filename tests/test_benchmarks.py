"""The arithmetic behind benchmark figures: a bound that is wrong makes every fraction of it wrong."""

from pathlib import Path
from random import Random
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def gpu_bound(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_bound

    return gpu_bound


def prefixes(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_counts_every_distinct_prefix_once(gpu_bound: ModuleType, seed: int) -> None:
    """Prompts of two letters share prefixes at every depth, and end at different times."""
    from gpu_workloads import Workload

    rng = Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 20))]
    max_tokens = [rng.randint(1, 5) for _ in prompts]
    workload = Workload(prompts, max_tokens, n=rng.randint(1, 3))
    bandwidth, flops = 1e12, 1e14
    _, layers, heads, _ = gpu_bound.SHAPES["0.6b"]
    weights, head = gpu_bound.num_weights("0.6b")
    num_keys = sum(len(prefix) - 0.5 for prefix in prefixes(prompts))
    expected = (2 * weights * len(prefixes(prompts)) + 4 * layers * heads * 128 * num_keys) / flops
    for step in range(1, max(max_tokens)):
        live = [prompt for prompt, num in zip(prompts, max_tokens, strict=True) if num > step]
        num_tokens = len(prefixes(live)) + workload.n * len(live) * step
        expected += gpu_bound.step_bytes("0.6b", num_tokens) / bandwidth
        expected += 2 * (weights + head) * workload.n * len(live) / flops
    assert gpu_bound.bound_s("0.6b", workload, bandwidth, flops, 2) == pytest.approx(expected, rel=1e-9)
