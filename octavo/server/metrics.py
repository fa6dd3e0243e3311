"""Prometheus metrics: vLLM's names, for which dashboards exist, and `octavo:` for what only Octavo has.

Everything is read from the loop's snapshot at a scrape; serving a token updates nothing here.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.engine_stats import EngineStats
from octavo.sampling_params import SamplingParams
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.stats import HistogramSnapshot, LoopStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["model_name", "engine"]
_REASONS = ("stop", "length", "abort", "error")
_MAX_TOKENS_BUCKETS = tuple(float(1 << power) for power in range(18))
_N_BUCKETS = tuple(float(1 << power) for power in range(8))


# Metrics by name: the field of LoopStats, and the help text.
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("first_token_s", "from the request to its first token"),
    "vllm:inter_token_latency_seconds": ("inter_token_s", "between two tokens that a client got"),
    "vllm:request_time_per_output_token_seconds": ("token_s", "mean time between a request's tokens"),
    "vllm:e2e_request_latency_seconds": ("e2e_s", "from the request to its end"),
    "vllm:request_queue_time_seconds": ("queue_s", "from the request to its first step"),
    "vllm:request_inference_time_seconds": ("inference_s", "from the first step to the end"),
    "vllm:request_prefill_time_seconds": ("prefill_s", "from the first step to the first token"),
    "vllm:request_decode_time_seconds": ("decode_s", "from the first token to the end"),
    "vllm:request_prompt_tokens": ("prompt_tokens", "prompt tokens of a request"),
    "vllm:request_generation_tokens": ("output_tokens", "tokens of all of a request's completions"),
    "vllm:request_max_num_generation_tokens": ("longest_tokens", "tokens of its longest completion"),
    "vllm:request_prefill_kv_computed_tokens": ("computed_tokens", "prompt tokens that were not cached"),
    "vllm:request_num_preemptions": ("preemptions", "how often a request lost its blocks"),
    "vllm:iteration_tokens_total": ("step_tokens", "tokens of a step"),
    "octavo:grammar_compile_seconds": ("compile_s", "to compile a grammar, or to find it compiled"),
}


class Metrics:
    """The counters of one server."""

    def __init__(self, loop: EngineLoop, model: str, num_restarts: int = 0) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_LoopCollector(loop, model, num_restarts))
        labels = (model, "0")
        self._n = Histogram(
            "vllm:request_params_n", "n of requests", _LABELS, registry=self._registry, buckets=_N_BUCKETS
        ).labels(*labels)
        self._max_tokens = Histogram(
            "vllm:request_params_max_tokens",
            "max_tokens of requests that have it",
            _LABELS,
            registry=self._registry,
            buckets=_MAX_TOKENS_BUCKETS,
        ).labels(*labels)
        self._answers = Counter(
            "octavo:http_responses", "answers by status", ["status"], registry=self._registry
        )

    def note_params(self, params: SamplingParams) -> None:
        """Count what a request asks for."""
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def note_answer(self, status: int) -> None:
        """Count an answer."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)


class _LoopCollector(Collector):
    """Reads a loop's snapshot."""

    def __init__(self, loop: EngineLoop, model: str, num_restarts: int) -> None:
        self._loop = loop
        self._num_restarts = num_restarts
        self._labels = [model, "0"]

    def collect(self) -> Iterator[Metric]:
        stats = self._loop.stats()
        yield from self._queue(stats)
        yield from self._requests(stats)
        for name, (field, help_) in HISTOGRAMS.items():
            yield self._histogram(name, help_, getattr(stats, field))
        if stats.engine is not None:
            yield from self._engine(stats.engine)
            yield self._cache_config(stats.engine)

    def _queue(self, stats: LoopStats) -> Iterator[Metric]:
        yield self._gauge(
            "vllm:num_requests_waiting", "completions that wait for admission", stats.num_waiting
        )
        yield self._split(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "the same; nothing is ever deferred here",
            {"reason": {"capacity": stats.num_waiting, "deferred": 0}},
        )
        yield self._split(
            CounterMetricFamily,
            "vllm:admission_rejections",
            "requests refused as the queue was full",
            {"reason": {"capacity": stats.num_rejected}},
        )
        for name, help_, value in (
            ("octavo:waiting_tokens", "prompt tokens that wait for admission", stats.num_waiting_tokens),
            ("octavo:live_requests", "unfinished requests", stats.num_live),
            ("octavo:kv_blocks_leaked", "blocks held when no request was left", stats.num_leaked_blocks),
            (
                "octavo:seconds_since_progress",
                "since a step ended, 0 when idle",
                self._loop.seconds_since_progress,
            ),
        ):
            yield self._gauge(name, help_, value)
        yield self._counter(
            "octavo:engine_restarts", "processes before this one whose engine died", self._num_restarts
        )

    def _requests(self, stats: LoopStats) -> Iterator[Metric]:
        prompt, cached = stats.num_prompt_tokens, stats.num_cached_tokens
        yield self._counter("vllm:prompt_tokens", "prompt tokens of requests that ended", prompt)
        yield self._counter("vllm:prompt_tokens_cached", "those that were found in the prefix cache", cached)
        yield self._split(
            CounterMetricFamily,
            "vllm:prompt_tokens_by_source",
            "prompt tokens of requests that ended",
            {"source": {"local_compute": prompt - cached, "local_cache_hit": cached}},
        )
        yield self._counter(
            "vllm:generation_tokens",
            "tokens generated",
            stats.engine.num_output_tokens if stats.engine else 0,
        )
        yield self._split(
            CounterMetricFamily,
            "vllm:request_success",
            "requests that ended",
            {"finished_reason": {reason: stats.num_finished.get(reason, 0) for reason in _REASONS}},
        )

    def _cache_config(self, engine: EngineStats) -> Metric:
        plan, config = self._loop.engine.plan, self._loop.engine.config
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "the KV cache",
            labels=["engine", "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"],
        )
        values = (plan.block_size, engine.kv.num_blocks, config.enable_prefix_caching, plan.kv_dtype)
        family.add_metric(["0", *(str(value).removeprefix("torch.") for value in values)], 1)
        return family

    def _engine(self, engine: EngineStats) -> Iterator[Metric]:
        kv, late, sharing = engine.kv, engine.late_work, engine.sharing
        for name, help_, value in (
            ("vllm:num_requests_running", "completions in the running set", engine.num_running),
            ("vllm:kv_cache_usage_perc", "share of the blocks in use, 0 .. 1", kv.usage),
            ("octavo:kv_blocks", "blocks of the KV cache", kv.num_blocks),
            ("octavo:kv_blocks_referenced", "blocks in at least one block table", kv.num_referenced),
            ("octavo:kv_blocks_shared", "blocks in more than one block table", kv.num_shared),
            ("octavo:kv_blocks_cached", "unreferenced blocks that can still be hit", kv.num_cached),
            ("octavo:kv_saved_bytes", "bytes that copies for each sequence would take", kv.saved_bytes),
            ("octavo:forest_nodes", "prefixes that the last step read once for several", sharing.num_nodes),
        ):
            yield self._gauge(name, help_, value)
        for name, help_, value in (
            ("vllm:prefix_cache_queries", "tokens looked up in the prefix cache", kv.prefix_query_tokens),
            ("vllm:prefix_cache_hits", "tokens found there", kv.prefix_hit_tokens),
            ("vllm:num_preemptions", "times a request lost its blocks", engine.num_preemptions),
            ("octavo:steps", "steps", engine.num_steps),
            ("octavo:computed_tokens", "tokens computed, recomputation included", engine.num_computed_tokens),
            ("octavo:saved_kv_tokens", "tokens not read thanks to sharing, per layer", sharing.saved_tokens),
            ("octavo:evicted_blocks", "cached blocks lost to new allocations", kv.num_evictions),
            ("octavo:prefix_lost_tokens", "tokens not found for want of a window", kv.prefix_lost_tokens),
            ("octavo:late_kernels", "kernels compiled after the server was ready", late.compiled),
            ("octavo:late_graphs", "CUDA graphs captured after the server was ready", late.captured),
            ("octavo:late_allocations", "memory asked of the driver after that", late.allocated),
        ):
            yield self._counter(name, help_, value)

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        return self._split(GaugeMetricFamily, name, help_, {}, value)

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        return self._split(CounterMetricFamily, name, help_, {}, value)

    def _split(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        help_: str,
        by: Mapping[str, Mapping[str, float]],
        whole: float = 0,
    ) -> Metric:
        """Return a metric: one value, or one for each value of a further label."""
        found = family(name, help_, labels=[*_LABELS, *by])
        for values in by.values():
            for label, value in values.items():
                found.add_metric([*self._labels, label], value)
        if not by:
            found.add_metric(self._labels, whole)
        return found

    def _histogram(self, name: str, help_: str, found: HistogramSnapshot) -> Metric:
        family = HistogramMetricFamily(name, help_, labels=_LABELS)
        buckets, seen = [], 0
        for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(self._labels, buckets, found.total)
        return family
