"""Figures of a run, under the names that `vllm bench serve` gives them in its JSON, and their plot."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench_client.client import Answer
from octavo.bench_client.load import Load
from octavo.bench_client.options import LoadOptions

Figures = dict[str, Any]

# A client that is later or busier than this measures itself instead of the server.
MAX_LATE_MS = 10.0
MAX_CPU_SHARE = 0.8
# The first requests may wait for kernels to be compiled and for pages to be read.
_FIRST_SHARE = 0.1


def summarise(options: LoadOptions, load: Load) -> Figures:
    """Return all figures; times are milliseconds where the name ends so, percentiles interpolate linearly."""
    good = [answer for answer in load.answers if answer.error is None]
    num_input = sum(answer.usage.prompt_tokens for answer in good if answer.usage is not None)
    num_output = sum(answer.num_output_tokens for answer in good)
    figures: Figures = {
        "completed": len(good),
        "failed": len(load.answers) - len(good),
        "duration": load.duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / load.duration_s,
        "request_goodput": _goodput(options, load, good),
        "output_throughput": num_output / load.duration_s,
        "total_token_throughput": (num_input + num_output) / load.duration_s,
        "max_concurrent_requests": load.peak_concurrency,
        "tokens_per_event": num_output / max(1, sum(len(answer.token_s) for answer in good)),
    }
    for name, values in _metrics(good).items():
        figures |= {f"{statistic}_{name}_ms": value for statistic, value in statistics_ms(values).items()}
    return {
        **figures,
        "first_requests": _first_requests(good),
        "client": _client(options, load),
        "errors": dict(Counter(answer.error for answer in load.answers if answer.error).most_common()),
        "warnings": warnings(options, load),
    }


def ttft_s(answer: Answer) -> float:
    """Return the seconds from sending to the first token."""
    return answer.token_s[0] - answer.sent_s


def e2el_s(answer: Answer) -> float:
    """Return the seconds from sending to the last token."""
    return answer.token_s[-1] - answer.sent_s


def tpot_s(answer: Answer) -> float | None:
    """Return the seconds per token after the first; None for a single token."""
    num_later = answer.num_output_tokens - 1
    return (answer.token_s[-1] - answer.token_s[0]) / num_later if num_later > 0 else None


def itl_s(answer: Answer) -> list[float]:
    """Return the seconds between events with new tokens."""
    return np.diff(answer.token_s).tolist()


def statistics_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, p90, p99 and maximum in milliseconds; None without values."""
    if not seconds:
        return dict.fromkeys(("mean", "median", "p90", "p99", "max"))
    values = np.asarray(seconds) * 1e3
    median, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    mean, most = float(values.mean()), float(values.max())
    return {"mean": mean, "median": median, "p90": p90, "p99": p99, "max": most}


def _metrics(good: Sequence[Answer]) -> Mapping[str, list[float]]:
    return {
        "ttft": [ttft_s(answer) for answer in good],
        "tpot": [tpot for answer in good if (tpot := tpot_s(answer)) is not None],
        "itl": [gap for answer in good for gap in itl_s(answer)],
        "e2el": [e2el_s(answer) for answer in good],
    }


def _goodput(options: LoadOptions, load: Load, good: Sequence[Answer]) -> float | None:
    """Return the requests per second that keep all limits; None without limits."""
    limits = options.limits_ms
    if not limits:
        return None

    def keeps(answer: Answer) -> bool:
        seconds: dict[str, float] = {
            "ttft": ttft_s(answer),
            "tpot": tpot_s(answer) or 0.0,
            "e2el": e2el_s(answer),
        }
        return all(seconds[name] * 1e3 <= limit for name, limit in limits.items())

    return sum(map(keeps, good)) / load.duration_s


def _first_requests(good: Sequence[Answer]) -> Figures:
    """Return the time to first token of the first tenth of the requests, and of the rest."""
    ordered = sorted(good, key=lambda answer: answer.sent_s)
    num_first = max(1, round(len(ordered) * _FIRST_SHARE))
    times = [ttft_s(answer) for answer in ordered]
    return {
        "number": min(num_first, len(ordered)),
        "first_ttft_ms": times[0] * 1e3 if times else None,
        "ttft_ms": statistics_ms(times[:num_first]),
        "ttft_ms_of_the_rest": statistics_ms(times[num_first:]),
    }


def _client(options: LoadOptions, load: Load) -> Figures:
    """Return how late and how busy the client itself was."""
    timed = load.answers if np.isfinite(options.request_rate) else []
    late = [answer.woken_s - answer.due_s for answer in timed]
    return {
        "late_ms": statistics_ms(late),
        "lag_ms": statistics_ms(load.lags_s),
        "cpu_share": load.cpu_share,
    }


def warnings(options: LoadOptions, load: Load) -> list[str]:
    """Return why the figures may not be what they seem: the client was too slow, or the server tells less."""
    found = []
    client = _client(options, load)
    for name, what, so in (
        ("late_ms", "sent requests", "it, not the requested rate, set the pace"),
        ("lag_ms", "woke up", "the times it saw may be too long by as much"),
    ):
        p99 = client[name]["p99"]
        if p99 is not None and p99 > MAX_LATE_MS:
            found.append(f"the client {what} {p99:.1f} ms late (p99): {so}")
    if load.cpu_share > MAX_CPU_SHARE:
        found.append(f"the client took {load.cpu_share:.0%} of a core: it was a bottleneck")
    good = [answer for answer in load.answers if answer.error is None]
    if any(answer.usage is None for answer in good):
        found.append("the server sends no usage: events are counted as output tokens, prompts not at all")
    elif options.ignore_eos:
        num_short = sum(answer.num_output_tokens < answer.max_tokens for answer in good)
        if num_short:
            found.append(f"{num_short} answers are shorter than asked for: the server knows no ignore_eos")
    return found


def plot(load: Load, title: str, path: Path) -> None:
    """Write a picture of time to first token and of the time between tokens; needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    good = sorted((a for a in load.answers if a.error is None), key=lambda answer: answer.sent_s)
    begun = good[0].sent_s if good else 0.0
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    over_time, shares = figure.subplots(1, 2)
    ttft_ms = [ttft_s(answer) * 1e3 for answer in good]
    over_time.plot([answer.sent_s - begun for answer in good], ttft_ms, ".")
    over_time.set_xlabel("sent after, s")
    over_time.set_ylabel("time to first token, ms")
    gaps_ms = [gap * 1e3 for answer in good for gap in itl_s(answer)]
    for values, label in ((ttft_ms, "time to first token"), (gaps_ms, "between tokens")):
        ordered = sorted(values)
        shares.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    shares.set_xscale("log")
    shares.set_xlabel("ms")
    shares.set_ylabel("share at most as long, %")
    shares.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
