"""`octavo bench`: offline throughput and latency of one engine on random token ids."""

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.cli.load_model import load
from octavo.cli.options import BenchOptions
from octavo.config import EngineConfig
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Measurements of one run of the workload.

    Attributes:
        duration_s: from the first request's submission to the last token.
        output_tokens_per_s, total_tokens_per_s: generated tokens, and prompt + generated tokens.
        ttft_ms, tpot_ms, e2e_ms: mean, median and p99 of time to first token, time per output token after
            the first, and end-to-end latency.
        num_prompt_tokens, num_output_tokens, num_cached_tokens, num_preemptions: sums over all requests.
        peak_rss_mib: the largest resident memory of the process.
    """

    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    peak_rss_mib: float


def run_bench(options: BenchOptions, config: EngineConfig) -> None:
    """Run the workload, print a table and a JSON line."""
    load_start = time.perf_counter()
    llm = load(config)
    load_s = time.perf_counter() - load_start
    prompts = _prompts(options, llm.engine.model_config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    for prompt in prompts[: options.num_warmup]:
        llm.generate(prompt, params)
    llm.reset_prefix_cache()
    result = measure(llm, prompts, params)
    _print_table(result, load_s)
    report = {"workload": asdict(options), "engine": asdict(config), "load_s": load_s, **asdict(result)}
    print(json.dumps(report))


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> BenchResult:
    """Submit all prompts at once and time them."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    duration_s = time.perf_counter() - start
    num_prompt_tokens = sum(output.metrics.num_prompt_tokens for output in outputs)
    num_output_tokens = sum(output.metrics.num_output_tokens for output in outputs)
    return BenchResult(
        duration_s=duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        ttft_ms=_summary([output.metrics.time_to_first_token_s or 0.0 for output in outputs]),
        tpot_ms=_summary([_time_per_output_token_s(output) for output in outputs]),
        e2e_ms=_summary([output.metrics.e2e_latency_s or 0.0 for output in outputs]),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_preemptions=sum(output.metrics.num_preemptions for output in outputs),
        peak_rss_mib=peak_rss_mib(),
    )


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far."""
    import resource
    import sys

    status = Path("/proc/self/status")
    if status.exists():
        # On Linux, ru_maxrss includes the parent's memory when it started this process.
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _prompts(options: BenchOptions, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    prefix = [rng.randrange(vocab_size) for _ in range(options.shared_prefix_len)]
    num_own = options.input_len - options.shared_prefix_len
    return [prefix + [rng.randrange(vocab_size) for _ in range(num_own)] for _ in range(options.num_prompts)]


def _time_per_output_token_s(output: RequestOutput) -> float:
    metrics = output.metrics
    decode_s = (metrics.e2e_latency_s or 0.0) - (metrics.time_to_first_token_s or 0.0)
    return decode_s / max(1, metrics.num_output_tokens - 1)


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(value * 1000 for value in seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"mean": statistics.fmean(ordered), "median": statistics.median(ordered), "p99": p99}


def _print_table(result: BenchResult, load_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "mean", "median", "p99")
    for name, figure in (
        ("time to first token, ms", result.ttft_ms),
        ("time per output token, ms", result.tpot_ms),
        ("end-to-end latency, ms", result.e2e_ms),
    ):
        table.add_row(name, *(f"{value:.1f}" for value in figure.values()))
    table.add_row("output tokens/s", f"{result.output_tokens_per_s:.1f}")
    table.add_row("prompt + output tokens/s", f"{result.total_tokens_per_s:.1f}")
    table.add_row("prompt tokens from the prefix cache", str(result.num_cached_tokens))
    table.add_row("model load, s", f"{load_s:.2f}")
    table.add_row("peak resident memory, MiB", f"{result.peak_rss_mib:.0f}")
    Console().print(table)
