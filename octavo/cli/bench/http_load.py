"""`octavo bench serve`: throughput and latency of any server with OpenAI's API."""

import asyncio
import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

from octavo.bench_client.options import LoadOptions
from octavo.cli.options import ServeBenchOptions, check_folder, check_plot
from octavo.cli.streams import print_json
from octavo.errors import ConfigError, OctavoError
from octavo.install_hint import install_extra

_METRICS = {
    "time to first token (TTFT), ms": "ttft",
    "time per output token (TPOT), ms": "tpot",
    "inter-token latency (ITL), ms": "itl",
    "end-to-end latency (E2EL), ms": "e2el",
}
_STATISTICS = ("mean", "median", "p90", "p99", "max")


def run_serve_bench(options: ServeBenchOptions) -> None:
    """Put the load on the server; print tables and a JSON line, and write the files that were asked for.

    Raises:
        ConfigError: aiohttp or matplotlib is missing, a file cannot be written, or no server answers.
        OctavoError: no request succeeded; the figures are printed all the same.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(f"octavo bench serve needs aiohttp; run: {install_extra('bench')}")
    for name in ("json_file", "plot"):
        if (text := getattr(options, name)) is not None:
            check_folder(name, Path(text))
    if options.plot is not None:
        check_plot(Path(options.plot))
    from octavo.bench_client.load import run_load
    from octavo.bench_client.summary import Figures, plot, summarise

    load = asyncio.run(run_load(options))
    figures: Figures = summarise(options, load)
    _print(figures)
    for warning in figures["warnings"]:
        print(f"octavo: warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        plot(load, _title(options), Path(options.plot))
    report = json.dumps({"workload": _describe(options), **figures})
    if options.json_file is not None:
        Path(options.json_file).write_text(report + "\n", encoding="utf-8")
    print_json(report)
    if not figures["completed"]:
        raise OctavoError(f"no request succeeded: {next(iter(figures['errors']))}")


def _describe(options: LoadOptions) -> dict[str, object]:
    """Return the options without secrets, as JSON, which has no infinity."""
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(LoadOptions)}
    fields["request_rate"] = None if math.isinf(options.request_rate) else options.request_rate
    return {name: value for name, value in fields.items() if name != "api_key"}


def _title(options: LoadOptions) -> str:
    rate = "all at once" if math.isinf(options.request_rate) else f"{options.request_rate:g} requests/s"
    places = f", at most {options.max_concurrency} at a time" if options.max_concurrency else ""
    return f"{options.url}, {options.endpoint}: {options.num_prompts} requests, {rate}{places}"


def _print(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    counts = Table("figure", "value")
    for name, value in _counts(figures):
        counts.add_row(name, value)
    console.print(counts)
    times = Table("ms", *_STATISTICS)
    for label, name in _METRICS.items():
        times.add_row(label, *(_ms(figures[f"{statistic}_{name}_ms"]) for statistic in _STATISTICS))
    first = figures["first_requests"]
    times.add_row(f"TTFT of the first {first['number']} requests", *map(_ms, first["ttft_ms"].values()))
    times.add_row("TTFT of the rest", *map(_ms, first["ttft_ms_of_the_rest"].values()))
    times.add_row("client: sent late", *map(_ms, figures["client"]["late_ms"].values()))
    times.add_row("client: woke up late", *map(_ms, figures["client"]["lag_ms"].values()))
    console.print(times)
    if figures["errors"]:
        errors = Table("requests", "error")
        for message, number in figures["errors"].items():
            errors.add_row(str(number), Text(message))
        console.print(errors)


def _counts(figures: dict) -> list[tuple[str, str]]:
    goodput, within = figures["request_goodput"], []
    if goodput is not None:
        within.append(("requests/s within the limits (goodput)", f"{goodput:.2f}"))
    return [
        ("successful requests", str(figures["completed"])),
        ("failed requests", str(figures["failed"])),
        ("duration, s", f"{figures['duration']:.2f}"),
        ("input tokens", str(figures["total_input_tokens"])),
        ("generated tokens", str(figures["total_output_tokens"])),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        *within,
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
        ("input + output tokens/s", f"{figures['total_token_throughput']:.1f}"),
        ("peak concurrent requests", str(figures["max_concurrent_requests"])),
        ("tokens per event", f"{figures['tokens_per_event']:.2f}"),
        ("client: share of a core", f"{figures['client']['cpu_share']:.0%}"),
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
