"""Latency under load: requests that arrive at random times, and figures from the times of their tokens.

Times are seconds since the run began. Needs neither torch nor a GPU, and no engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

STALL_S = 0.05
_NUM_QUARTERS = 4
_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    Attributes:
        time_s: when it is due.
        prompt: token ids.
        max_tokens: output tokens.
    """

    time_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Trace:
    """What a run was seen to do.

    Attributes:
        token_times: for each request, when its tokens came.
        added: for each request, when the engine got it.
        steps: seconds of every step of the engine; empty where only its answers are seen.
    """

    token_times: list[list[float]]
    added: list[float]
    steps: list[float] = field(default_factory=list)


def poisson_arrivals(
    rate: float, seconds: float, seed: int, prompt_len: tuple[int, int], output_len: tuple[int, int]
) -> list[Arrival]:
    """Draw requests: exponential gaps between them, uniform lengths, uniform token ids below 10000.

    Args:
        rate: requests per second.
        seconds: requests arrive before this time.
        seed: of all draws.
        prompt_len, output_len: smallest and largest number of tokens, both included.
    """
    rng = np.random.default_rng(seed)
    arrivals, time_s = [], rng.exponential(1 / rate)
    while time_s < seconds:
        num_in = int(rng.integers(*prompt_len, endpoint=True))
        num_out = int(rng.integers(*output_len, endpoint=True))
        arrivals.append(Arrival(float(time_s), rng.integers(10000, size=num_in).tolist(), num_out))
        time_s += rng.exponential(1 / rate)
    return arrivals


def summarise(arrivals: Sequence[Arrival], trace: Trace, seconds: float) -> dict[str, Any]:
    """Figures of a run in which every request got all of its tokens.

    Quarters are those of the time in which requests arrive; what comes after it counts in the last one.

    Args:
        arrivals: the requests.
        trace: what became of them.
        seconds: length of the time in which requests arrive.
    """
    due = np.array([arrival.time_s for arrival in arrivals])
    ttft = np.array([times[0] for times in trace.token_times]) - due
    gaps = np.concatenate([np.diff(times) for times in trace.token_times])
    ends = np.concatenate([times[1:] for times in trace.token_times])
    num_tokens, end = sum(map(len, trace.token_times)), max(times[-1] for times in trace.token_times)
    return {
        "requests": len(arrivals),
        "output_tokens": num_tokens,
        "seconds": end,
        "output_tokens_per_s": num_tokens / end,
        "ttft_ms": percentiles_ms(ttft),
        "ttft_ms_by_quarter": by_quarter(ttft, due, seconds),
        "inter_token_ms": percentiles_ms(gaps),
        "inter_token_ms_by_quarter": by_quarter(gaps, ends, seconds),
        "pauses": pauses(trace.token_times),
        "steps": summarise_steps(trace.steps),
        "mean_kv_tokens": mean_kv_tokens(arrivals, trace.token_times),
        "last_added_late_s": trace.added[-1] - arrivals[-1].time_s,
        "most_added_late_s": float((np.array(trace.added) - due).max()),
        "seconds_after_last_arrival": end - arrivals[-1].time_s,
    }


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p99 and maximum in milliseconds, interpolated linearly; None of nothing."""
    values = np.fromiter(seconds, dtype=float)
    if not values.size:
        return None
    return {name: round(float(np.percentile(values, share)) * 1e3, 3) for name, share in _PERCENTILES.items()}


def by_quarter(values: np.ndarray, times: np.ndarray, seconds: float) -> list[dict[str, float] | None]:
    """Percentiles of the values whose times fall into each quarter of [0, seconds); later ones: the last."""
    quarters = np.minimum(times * _NUM_QUARTERS / seconds, _NUM_QUARTERS - 1).astype(int)
    return [percentiles_ms(values[quarters == quarter]) for quarter in range(_NUM_QUARTERS)]


def pauses(token_times: Iterable[Sequence[float]], limit_s: float = STALL_S) -> dict[str, float]:
    """How often, and for how many seconds in all, some request waited longer than the limit for a next token.

    Waits of several requests that overlap are one pause, from the first beginning to the last end.
    """
    waits = [(begin, end) for times in token_times for begin, end in pairwise(times) if end - begin > limit_s]
    number, total, latest = 0, 0.0, -1.0
    for begin, end in sorted(waits):
        number += begin >= latest
        total += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return {"number": number, "seconds": total}


def summarise_steps(steps: Sequence[float]) -> dict[str, float] | None:
    """Number, median and longest (ms) of steps, how many were stalls, and the seconds of those."""
    if not steps:
        return None
    stalls = [step for step in steps if step > STALL_S]
    return {
        "number": len(steps),
        "median_ms": float(np.median(steps)) * 1e3,
        "longest_ms": max(steps) * 1e3,
        "stalls": len(stalls),
        "stalled_s": sum(stalls),
    }


def mean_kv_tokens(arrivals: Sequence[Arrival], token_times: Sequence[Sequence[float]]) -> float:
    """Tokens in the KV cache of requests that decode, averaged over the time until the last token."""
    total = 0.0
    for arrival, times in zip(arrivals, token_times, strict=True):
        lengths = len(arrival.prompt) + np.arange(1, len(times))
        total += float((lengths * np.diff(times)).sum())
    return total / max(times[-1] for times in token_times)
