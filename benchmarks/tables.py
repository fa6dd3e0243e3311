"""Tables and the chart that documents show, made from result files and from code: nobody types a figure.

    python benchmarks/tables.py [--check]

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is one of TABLES. A table
is made from the result files of one commit and names them; README's rows are each of one file. `--check`
writes nothing, and fails if a page or the chart is not what the result files say.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from support.common import table
from support.figures import cells, cpu_figures, files, int4_figures, load, number, serving_figures, slashed
from support.gpu_workloads import WORKLOADS
from support.shares_chart import draw

from octavo.server.api import left_out
from octavo.server.api.body import REFUSED

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "server-api.md")
CHART = ROOT / "docs" / "images" / "speed.svg"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

CPU_WORKLOADS = {
    "single": "one request, 128 in, 128 out",
    "batch16": "16 requests, 32-256 in, 64-128 out",
    "batch64": "64 requests",
    "shared32": "32 requests behind 512 common tokens, 64 out",
}
GPU_WORKLOADS = {
    "shared": "256 requests behind 4,096 common tokens, 256 out",
    "samples64x8": "64 prompts x 8 samples of 128",
    "rag": "16 documents x 16 questions, 64 out",
    "fewshot": "512 inputs behind 4,096 common tokens, 1 out",
    "nano": "256 requests, 100-1024 in and out",
    "mid": "128 requests, 256-1024 in, 128-256 out",
    "single": "one request, 512 in, 256 out",
    "ttft8k": "8,192 in, first token",
}
# Table -> machine and commit, and rows by the ends of their files' names.
MODELS = {
    "h200-models": (
        "h200-1f19b61",
        {
            "gpu_serving-8b-weights-fp8": "Qwen3-8B, fp8",
            "gpu_int4-engine": "Qwen3-8B, int4",
            "gpu_serving-30b-a3b": "Qwen3-30B-A3B, bf16",
            "gpu_serving-30b-a3b-weights-fp8": "Qwen3-30B-A3B, fp8",
            "gpu_int4-engine-30b-a3b": "Qwen3-30B-A3B, int4",
            "gpu_serving-gpt-oss-20b": "gpt-oss-20b, MXFP4",
        },
    ),
    "h100-models": (
        "h100-4b7d414",
        {
            "gpu_serving-8b-weights-fp8": "Qwen3-8B, fp8",
            "gpu_int4": "Qwen3-8B, int4",
            "gpu_serving-30b-a3b": "Qwen3-30B-A3B, bf16",
            "gpu_serving-gpt-oss-20b": "gpt-oss-20b, MXFP4",
        },
    ),
}
CPU, SMALL = "amd-epyc-zen5-2core-6a40f8e-cpu_throughput", "h200-2c96888-gpu_serving-0.6b"
LARGE = "h200-1f19b61-gpu_serving-"


class Headline(NamedTuple):
    """A row of README: a first run beside a peer's in the same call."""

    what: str
    file: str
    workload: str
    peer: str = "vLLM 0.26"


HEADLINES = (
    Headline("2 CPU cores, SmolLM2-135M: one request", CPU, "single", "llama.cpp"),
    Headline("the same: 32 requests behind 512 common tokens", CPU, "shared32", "llama.cpp"),
    Headline("H200, Qwen3-0.6B: 256 requests behind 4,096 common tokens", SMALL, "shared"),
    Headline("the same: 256 requests that share nothing", SMALL, "nano"),
    Headline("H200, Qwen3-8B in fp8: 128 requests", f"{LARGE}8b-weights-fp8", "mid"),
    Headline("H200, gpt-oss-20b: one request", f"{LARGE}gpt-oss-20b", "single"),
)


def headlines() -> list[tuple[Headline, float, float, float]]:
    """README's rows: what was measured, Octavo, its share of the bound, the peer."""
    rows = []
    for headline in HEADLINES:
        measure = cpu_figures if headline.file == CPU else serving_figures
        octavo, share, peer = measure(headline.file, headline.workload)
        assert peer, f"{headline.file} has no peer in the same call"
        rows.append((headline, octavo, share, peer))
    return rows


def readme() -> str:
    rows = [
        [headline.what, number(octavo), f"{number(peer)} ({headline.peer})", number(octavo / share)]
        for headline, octavo, share, peer in headlines()
    ]
    names = dict.fromkeys(headline.file for headline in HEADLINES)
    return table(["output tokens/s", "Octavo", "peer", "bound"], rows) + files(*names)


def cpu() -> str:
    rows = [[what, *cells(cpu_figures(CPU, workload))] for workload, what in CPU_WORKLOADS.items()]
    return table(["tokens/s", "Octavo", "of the bound", "llama.cpp"], rows) + files(CPU)


def cpu_gpt_oss() -> str:
    name, rows = "amd-epyc-zen5-2core-24layers-2333d70-cpu_gpt_oss", []
    for workload, what in (("single", "one request"), ("batch8", "eight at once")):
        result = load(name)["results"][workload]
        octavo, peer = result["octavo"][0], result["llama.cpp"][0]
        rate = octavo["tokens_per_s"]
        rows.append([what, *cells((rate, rate / result["bound"], peer["tokens_per_s"]))])
        rows[-1] += [f"{engine['peak_gib']:.1f}" for engine in (octavo, peer)]
    header = ["tokens/s", "Octavo", "of the bound", "llama.cpp", "GiB", "llama.cpp's"]
    return table(header, rows) + files(name)


def small_model() -> str:
    rows = []
    for workload, what in GPU_WORKLOADS.items():
        unit = " ms" if WORKLOADS[workload]().unit == "ms" else ""
        rows.append([what, *cells(serving_figures(SMALL, workload), unit)])
    return table(["tokens/s", "Octavo", "of the bound", "vLLM 0.26"], rows) + files(SMALL)


def models(machine: str, ends: dict[str, str]) -> str:
    """Models by the ends of their files' names: one request, and 128, on a machine at a commit."""
    rows = []
    for end, what in ends.items():
        row = [what]
        for workload in ("single", "mid"):
            name = f"{machine}-{end}"
            is_int4 = end.startswith("gpu_int4")
            rates = f"{machine}-gpu_serving-30b-a3b"
            figures = int4_figures(name, workload, rates) if is_int4 else serving_figures(name, workload)
            row += cells(figures)
        rows.append(row)
    header = ["tokens/s", "one request", "of the bound", "vLLM", "128 requests", "of the bound", "vLLM"]
    return table(header, rows) + files(f"{machine}-gpu_*")


def open_loop() -> str:
    name, rows = "h200-7932823-gpu_open_loop-8b", []
    engines = [load(name)["engines"][engine] for engine in ("Octavo", "vllm")]
    for key, what in (("ttft_ms", "first token"), ("inter_token_ms", "between tokens")):
        times = [engine["runs"][0][key] for engine in engines]
        rows.append([what, *(slashed([time[p] for p in ("p50", "p90", "p99")]) for time in times)])
    rows.append(["ready, first start", *(f"{engine['ready_s']:.0f} s" for engine in engines)])
    return table(["ms, p50 / p90 / p99", "Octavo", "vLLM 0.26"], rows) + files(name)


def gpu_http() -> str:
    """The better of two runs of each load, by tokens per second."""
    name, rows = "h200-7932823-gpu_serve-0.6b-4-clients", []
    loads = {
        "1 streams": "1 stream",
        "32 streams": "32 streams",
        "256 streams": "256 streams",
        "shared": "256 behind 4,096 common ids",
    }
    for load_name, what in loads.items():
        runs = [load(name)["servers"][server]["loads"][load_name] for server in ("Octavo", "vLLM")]
        best = [max(tries, key=lambda run: run["output_throughput"]) for tries in runs]
        rates = [number(run["output_throughput"]) for run in best]
        rows.append([what, *rates, *(f"{run['median_ttft_ms']:,.0f}" for run in best)])
    header = ["tokens/s", "Octavo", "vLLM 0.26", "first token, ms", "vLLM's"]
    return table(header, rows) + files(name)


def portable() -> str:
    """The portable tier beside the Hopper tier of the same machine and commit."""
    rows, machine = [], "h200-43f51e33-gpu_serving"
    names = [f"{machine}-0.6b-generation-8", f"{machine}-8b-generation-8"]
    for model, name, workloads in (
        ("0.6B", names[0], ("single", "mid", "nano", "shared")),
        ("8B", names[1], ("single", "mid")),
    ):
        for workload in workloads:
            own, _, peer = serving_figures(name, workload)
            hopper, *_ = serving_figures(name.removesuffix("-generation-8"), workload)
            cells_of = [number(own), number(hopper), f"{own / hopper:.2f}", number(peer) if peer else ""]
            rows.append([f"Qwen3-{model}: {GPU_WORKLOADS[workload]}", *cells_of])
    header = ["tokens/s", "portable", "Hopper tier", "ratio", "vLLM 0.26, all of Hopper"]
    return table(header, rows) + files(*names, f"{machine}-0.6b", f"{machine}-8b")


def forest() -> str:
    name, rows = "h200-7d5c172-gpu_forest", []
    results = load(name)["results"]
    for workload in dict.fromkeys(result["workload"] for result in results):
        of = {result["impl"]: result for result in results if result["workload"] == workload}
        if "fa3 flat" not in of:
            # Peers are measured without windows only.
            continue
        cascade = min(result["us"] for impl, result in of.items() if "cascade" in impl)
        times = (of["octavo forest"]["us"], of["fa3 flat"]["us"], cascade)
        rows.append([workload, *(f"{us:.0f}" for us in times), f"{of['octavo forest']['of_bound']:.0%}"])
    header = ["us", "Octavo", "FlashAttention-3", "FlashInfer", "of the bound"]
    return table(header, rows) + files(name)


def ops() -> str:
    name, rows = "h200-bc264d7-gpu_ops", []
    for form in ("decode paged", "prefill paged", "prefill dense", "prefill ragged"):
        found = load(name)["summary"][form]
        rows.append([form, found["rows"], f"{found['geometric_mean']:.2f}", f"{found['least']:.2f}"])
    header = ["times FlashAttention-3's speed", "shapes", "geometric mean", "least"]
    return table(header, rows) + files(name)


def left_out_fields() -> str:
    return left_out_list(left_out.FIELDS)


def left_out_tools() -> str:
    return left_out_list(left_out.TOOLS)


def left_out_items() -> str:
    return left_out_list((*left_out.ITEMS, *left_out.INCLUDES))


def left_out_list(rows: tuple[left_out.LeftOut, ...]) -> str:
    """Rows of the same APIs and reason that follow each other are one."""
    groups = groupby(rows, lambda row: (row.apis, row.why))
    return "\n".join(
        wrapped(f"* {coded(row.name for row in group)} ({', '.join(apis)}): {why}.")
        for (apis, why), group in groups
    )


def refused() -> str:
    return wrapped(f"{coded(REFUSED)}.")


def wrapped(text: str) -> str:
    indent = "  " if text.startswith("* ") else ""
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        readme,
        cpu,
        cpu_gpt_oss,
        small_model,
        portable,
        open_loop,
        gpu_http,
        forest,
        ops,
        left_out_fields,
        left_out_tools,
        left_out_items,
        refused,
    )
} | {name: partial(models, *case) for name, case in MODELS.items()}


def filled(text: str) -> str:
    """Return a page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def made() -> dict[Path, str]:
    """Return what each page and the chart should hold."""
    rows = [(h.what, h.peer, share, share * peer / octavo) for h, octavo, share, peer in headlines()]
    return {path: filled(path.read_text()) for path in PAGES} | {CHART: draw(rows)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if something would change")
    check = parser.parse_args().check
    changed = {p: text for p, text in made().items() if not p.exists() or p.read_text() != text}
    for path, text in changed.items():
        if not check:
            path.write_text(text)
        print(path.name, "is out of date: run benchmarks/tables.py" if check else "written")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
