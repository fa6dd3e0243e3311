"""Times two calls in turns, and tells a ratio from noise."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

NUM_ROUNDS = 9
MAX_TRIES = 3
# Largest distance between the quartiles of the rounds' ratios, as a share of their median.
MAX_SPREAD = 0.25


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two calls, each timed once in each round.

    Attributes:
        first_s, second_s: median seconds.
        ratio: median of first / second over the rounds: what slows down a whole round cancels out.
        low, high: quartiles of that ratio.
        num_tries: how often all rounds were run.
    """

    first_s: float
    second_s: float
    ratio: float
    low: float
    high: float
    num_tries: int

    @property
    def is_noise(self) -> bool:
        """True if the rounds differ so much that their median says little."""
        return self.high - self.low > MAX_SPREAD * self.ratio


def compare(first: Callable[[], float], second: Callable[[], float]) -> Comparison:
    """Time two calls in turns; again, up to MAX_TRIES times, while the rounds are noise.

    Args:
        first: runs the first call and returns the seconds it took.
        second: likewise.
    """
    found = _compared(first, second, 1)
    while found.is_noise and found.num_tries < MAX_TRIES:
        found = _compared(first, second, found.num_tries + 1)
    return found


def _compared(first: Callable[[], float], second: Callable[[], float], num_tries: int) -> Comparison:
    rounds = [(first(), second()) for _ in range(NUM_ROUNDS)]
    low, ratio, high = statistics.quantiles((a / b for a, b in rounds), n=4)
    first_s, second_s = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    return Comparison(first_s, second_s, ratio, low, high, num_tries)


def timer(call: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Return a function that runs a call and returns its seconds; on a GPU, of a CUDA graph's replay."""
    call()
    if device.type == "cuda":
        return _replay_timer(call)

    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return timed


def _replay_timer(call: Callable[[], None]) -> Callable[[], float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While this replay runs, the measured one is launched.
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000

    return timed
