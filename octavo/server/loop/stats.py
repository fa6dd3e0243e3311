"""The counters of a loop: latencies in histograms of fixed size, outcomes, and the engine's own counters."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.engine.engine_stats import EngineStats
from octavo.outputs import RequestMetrics, RequestOutput

# Upper bounds of buckets: six per decade, from 0.1 ms to 1,000 s, and powers of two of tokens.
SECONDS = tuple(
    round(digit * 10.0**power, 9) for power in range(-4, 3) for digit in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
)
TOKENS = tuple(float(1 << power) for power in range(21))
PREEMPTIONS = (0.0, *(float(1 << power) for power in range(7)))


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations, counted by size.

    Attributes:
        bounds: upper bounds of the buckets, inclusive, ascending; one more bucket has no bound.
        counts: observations per bucket, not cumulative; one entry more than bounds.
        total: sum of all observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the bound below which a share (0 .. 1) of the values lies; None without values.

        Values in the bucket without a bound count as the largest bound.
        """
        if not any(self.counts):
            return None
        left = share * self.count
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0 and count:
                return bound
        return self.bounds[-1]


class Histogram:
    """Counts values. One thread observes, any thread may take a snapshot."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramSnapshot:
        """Return what was counted so far."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """A snapshot of a loop. Counters count since it was made.

    Attributes:
        engine: the engine's counters and its pool, at most a step or 0.1 s old; None before it is ready.
        num_waiting: completions (each of n counts) that wait for their first token to be scheduled.
        num_waiting_tokens: prompt tokens of their requests.
        num_live: unfinished requests, waiting ones included.
        num_rejected: requests refused because the queue was full.
        num_finished: requests that ended, by the finish_reason of their first completion.
        num_prompt_tokens: of requests that ended.
        num_cached_tokens: prompt tokens of them that came from the prefix cache.
        num_output_tokens: likewise, of all completions.
        num_leaked_blocks: blocks of the KV cache that were held when no request was left.
        first_token_s: from `submit` to the first token.
        inter_token_s: between a completion's tokens, one observation per token but those read with the first.
        queue_s: from `submit` until the first token is scheduled; for requests that ended, like all below.
        prefill_s: from there to the first token.
        decode_s: from the first token to the end.
        e2e_s: from `submit` to the end.
        inference_s: from the first scheduled token to the end.
        token_s: decode_s divided by the tokens that came in it, of the longest completion.
        prompt_tokens: lengths of prompts.
        output_tokens: tokens per request, of all its completions.
        longest_tokens: tokens of each request's longest completion.
        computed_tokens: prompt tokens per request that did not come from the prefix cache.
        preemptions: how often each request lost its blocks.
        step_tokens: tokens per step.
        compile_s: to compile a grammar, or to find it compiled.
    """

    engine: EngineStats | None
    num_waiting: int
    num_waiting_tokens: int
    num_live: int
    num_rejected: int
    num_finished: Mapping[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_leaked_blocks: int
    first_token_s: HistogramSnapshot
    inter_token_s: HistogramSnapshot
    queue_s: HistogramSnapshot
    prefill_s: HistogramSnapshot
    decode_s: HistogramSnapshot
    e2e_s: HistogramSnapshot
    inference_s: HistogramSnapshot
    token_s: HistogramSnapshot
    prompt_tokens: HistogramSnapshot
    output_tokens: HistogramSnapshot
    longest_tokens: HistogramSnapshot
    computed_tokens: HistogramSnapshot
    preemptions: HistogramSnapshot
    step_tokens: HistogramSnapshot
    compile_s: HistogramSnapshot


def _of_tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class Finished:
    """Counts of requests that ended, and of steps. The engine's thread writes them."""

    reasons: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: Histogram = field(default_factory=Histogram)
    prefill_s: Histogram = field(default_factory=Histogram)
    decode_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    inference_s: Histogram = field(default_factory=Histogram)
    token_s: Histogram = field(default_factory=Histogram)
    prompt_tokens: Histogram = field(default_factory=_of_tokens)
    output_tokens: Histogram = field(default_factory=_of_tokens)
    longest_tokens: Histogram = field(default_factory=_of_tokens)
    computed_tokens: Histogram = field(default_factory=_of_tokens)
    preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))
    step_tokens: Histogram = field(default_factory=_of_tokens)

    def count(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        metrics = output.metrics
        self.reasons[output.outputs[0].finish_reason or "abort"] += 1
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_output_tokens += metrics.num_output_tokens
        self.prompt_tokens.observe(metrics.num_prompt_tokens)
        self.output_tokens.observe(metrics.num_output_tokens)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        self.longest_tokens.observe(longest)
        self.computed_tokens.observe(metrics.num_prompt_tokens - metrics.num_cached_tokens)
        self.preemptions.observe(metrics.num_preemptions)
        self._count_times(metrics, longest)

    def _count_times(self, metrics: RequestMetrics, longest: int) -> None:
        if metrics.queue_s is not None:
            self.queue_s.observe(metrics.queue_s)
        if metrics.e2e_latency_s is not None:
            self.e2e_s.observe(metrics.e2e_latency_s)
        if metrics.first_token_s is not None:
            assert metrics.first_scheduled_s is not None
            self.prefill_s.observe(metrics.first_token_s - metrics.first_scheduled_s)
            if metrics.finished_s is not None:
                decode_s = metrics.finished_s - metrics.first_token_s
                self.decode_s.observe(decode_s)
                self.inference_s.observe(metrics.finished_s - metrics.first_scheduled_s)
                if longest > 1:
                    self.token_s.observe(decode_s / (longest - 1))

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return all histograms by the names of their fields."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value.snapshot() for name, value in found.items() if isinstance(value, Histogram)}
