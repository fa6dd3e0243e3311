"""Prometheus metrics: vLLM's names, so that dashboards for it work, and what only Octavo has under `octavo:`.

All is read from the loop's snapshot when somebody scrapes; serving a token updates nothing here.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.stats import EngineStats
from octavo.sampling_params import SamplingParams
from octavo.server.loop.engine_loop import EngineLoop
from octavo.server.loop.stats import HistogramSnapshot, LoopStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["model_name", "engine"]
_REASONS = ("stop", "length", "abort", "error")
_MAX_TOKENS_BUCKETS = tuple(float(1 << power) for power in range(18))
_N_BUCKETS = tuple(float(1 << power) for power in range(8))


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
        yield self._gauge(
            "vllm:num_requests_waiting", "completions that wait for admission", stats.num_waiting
        )
        yield self._rejections(stats)
        yield from self._requests(stats)
        for name, histogram in _histograms(stats).items():
            yield self._histogram(f"vllm:{name}", histogram)
        if stats.engine is not None:
            yield from self._engine(stats.engine)
            yield self._cache_config(stats.engine)
        yield self._gauge(
            "octavo:waiting_tokens", "prompt tokens that wait for admission", stats.num_waiting_tokens
        )
        yield self._gauge("octavo:live_requests", "unfinished requests", stats.num_live)
        yield self._counter(
            "octavo:engine_restarts", "processes before this one whose engine died", self._num_restarts
        )
        seconds = self._loop.seconds_since_progress
        yield self._gauge("octavo:seconds_since_progress", "since a step ended, 0 when idle", seconds)

    def _requests(self, stats: LoopStats) -> Iterator[Metric]:
        for name, help_, value in (
            ("prompt_tokens", "prompt tokens of requests that ended", stats.num_prompt_tokens),
            ("prompt_tokens_cached", "of these, found in the prefix cache", stats.num_cached_tokens),
            ("generation_tokens", "tokens generated for requests that ended", stats.num_output_tokens),
        ):
            yield self._counter(f"vllm:{name}", help_, value)
        done = CounterMetricFamily(
            "vllm:request_success", "requests that ended", labels=[*_LABELS, "finished_reason"]
        )
        for reason in _REASONS:
            done.add_metric([*self._labels, reason], stats.num_finished.get(reason, 0))
        yield done

    def _rejections(self, stats: LoopStats) -> Metric:
        family = CounterMetricFamily(
            "vllm:admission_rejections", "requests refused", labels=[*_LABELS, "reason"]
        )
        family.add_metric([*self._labels, "capacity"], stats.num_rejected)
        return family

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
        kv, late = engine.kv, engine.late_work
        for name, help_, value in (
            ("vllm:num_requests_running", "completions in the running set", engine.num_running),
            ("vllm:kv_cache_usage_perc", "share of the blocks in use, 0 .. 1", kv.usage),
            ("octavo:kv_blocks", "blocks of the KV cache", kv.num_blocks),
            ("octavo:kv_blocks_referenced", "blocks in at least one block table", kv.num_referenced),
            ("octavo:kv_blocks_shared", "blocks in more than one block table", kv.num_shared),
            ("octavo:kv_blocks_cached", "unreferenced blocks that can still be hit", kv.num_cached),
            (
                "octavo:kv_saved_bytes",
                "bytes that a copy for each sequence would take on top",
                kv.saved_bytes,
            ),
        ):
            yield self._gauge(name, help_, value)
        for name, help_, value in (
            ("vllm:prefix_cache_queries", "tokens looked up in the prefix cache", kv.prefix_query_tokens),
            ("vllm:prefix_cache_hits", "tokens found there", kv.prefix_hit_tokens),
            ("vllm:num_preemptions", "times a request lost its blocks", engine.num_preemptions),
            ("octavo:steps", "steps", engine.num_steps),
            ("octavo:computed_tokens", "tokens computed, recomputation included", engine.num_computed_tokens),
            ("octavo:sampled_tokens", "tokens sampled", engine.num_output_tokens),
            ("octavo:evicted_blocks", "cached blocks lost to new allocations", kv.num_evictions),
            ("octavo:late_kernels", "kernels compiled after the server was ready", late.compiled),
            ("octavo:late_graphs", "CUDA graphs captured after the server was ready", late.captured),
        ):
            yield self._counter(name, help_, value)

    def _gauge(self, name: str, help_: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help_: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, found: HistogramSnapshot) -> Metric:
        family = HistogramMetricFamily(name, name.partition(":")[2].replace("_", " "), labels=_LABELS)
        buckets, seen = [], 0
        for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(self._labels, buckets, found.total)
        return family


def _histograms(stats: LoopStats) -> dict[str, HistogramSnapshot]:
    return {
        "time_to_first_token_seconds": stats.first_token_s,
        "inter_token_latency_seconds": stats.inter_token_s,
        "request_queue_time_seconds": stats.queue_s,
        "request_prefill_time_seconds": stats.prefill_s,
        "request_decode_time_seconds": stats.decode_s,
        "e2e_request_latency_seconds": stats.e2e_s,
        "request_prompt_tokens": stats.prompt_tokens,
        "request_generation_tokens": stats.output_tokens,
    }
