"""Figures of result files as tables show them: rates, shares of the bound, peers, and cells of Markdown."""

import json
from collections.abc import Sequence
from functools import cache
from textwrap import fill
from typing import Any

from .common import RESULTS
from .gpu_bound import bound_s, run_bound_s
from .gpu_workloads import WORKLOADS

# Bytes of a packed weight of 4 bits, scales included.
INT4_BYTES = 17 / 32
# A first run's figure, its share of the bound, and the peer's figure of the same call.
Figures = tuple[float, float, float | None]


@cache
def load(name: str) -> Any:
    """Read the result file of a name without its date, such as h200-7d5c172-gpu_forest."""
    (path,) = RESULTS.glob(f"????-??-??-{name}.json")
    return json.loads(path.read_text())


@cache
def cpu_figures(name: str, workload: str) -> Figures:
    """Tokens/s of the first run, beside the best run of llama.cpp, from a file of cpu_throughput.py."""
    report = load(name)
    octavo, peer = (report["results"][workload][engine] for engine in ("octavo", "llama.cpp"))
    num_tokens = octavo["tokens_per_s"] * octavo["seconds"]
    bound = num_tokens / report["bound_s"][workload]["blocks"]
    first = octavo["tokens_per_s_first"]
    return first, first / bound, peer["tokens_per_s_max"]


@cache
def serving_figures(name: str, workload: str) -> Figures:
    """The first run in its unit, beside the first run of vLLM, from a file of gpu_serving.py."""
    result, work = load(name)["results"][workload], WORKLOADS[workload]()
    seconds = result["seconds"][0]
    peer = result["vllm"]
    return work.rate(seconds), run_bound_s(load(name), work) / seconds, peer and peer["first_rate"]


@cache
def int4_figures(name: str, workload: str, rates: str) -> Figures:
    """Tokens/s of the first run with random weights of 4 bits, beside nobody.

    vLLM's figure is left out: it was no faster than in bfloat16, so that nothing shows that it ran quantised.

    Args:
        name: of the file, which holds one model.
        workload: a key of WORKLOADS.
        rates: name of a file of the same call, which has the machine's bandwidth and operations per second.
    """
    (result,) = (result for result in load(name)["results"] if result["workload"] == workload)
    machine, work, seconds = load(rates), WORKLOADS[workload](), result["seconds"][0]
    bandwidth, flops = machine["copy_bytes_per_s"], machine["matrix_flops"]
    bound = bound_s(result["model"], work, bandwidth, flops, 2, INT4_BYTES)
    return work.rate(seconds), bound / seconds, None


def number(value: float | None) -> str:
    """Write three digits or more, with commas; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def cells(figures: Figures, unit: str = "") -> list[str]:
    """Return the cells of Octavo's figure, its share of the bound and the peer's figure."""
    octavo, share, peer = figures
    return [number(octavo) + unit, f"{share:.0%}", number(peer) + unit if peer else ""]


def files(*names: str) -> str:
    """Return the line below a table, by which a reader finds its result files."""
    return "\n\n" + fill(
        "Files: " + ", ".join(f"`{name}`" for name in names) + ".", 118, break_on_hyphens=False
    )


def slashed(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values)
