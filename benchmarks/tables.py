"""Tables and the chart that documents show, made from result files: nobody types a figure.

    python benchmarks/tables.py [--check]

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is one of TABLES. Every table
is made from the result files of one commit and names them; README's six rows name a file each. `--check`
writes nothing, and fails if a page or the chart is not what the result files say.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.common import RESULTS, table
from support.gpu_bound import bound_s, run_bound_s
from support.gpu_workloads import WORKLOADS
from support.shares_chart import draw

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
CHART = ROOT / "docs" / "images" / "speed.svg"
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Bytes of a packed weight of 4 bits, scales included, as gpu_moe.py counts them.
INT4_BYTES = 17 / 32
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
CPU_WORKLOADS = {
    "single": "one request, 128 in, 128 out",
    "batch16": "16 requests, 32-256 in, 64-128 out",
    "batch64": "64 requests",
    "shared32": "32 requests behind 512 common tokens, 64 out",
}


@cache
def load(name: str) -> Any:
    """The result file of a name without its date, such as h200-7d5c172-gpu_forest."""
    (path,) = RESULTS.glob(f"????-??-??-{name}.json")
    return json.loads(path.read_text())


def cpu_figures(name: str, workload: str) -> tuple[float, float, float]:
    """First run's tokens/s, its share of the bound, and llama.cpp's best run."""
    result, bound_s = load(name)["results"][workload], load(name)["bound_s"][workload]["blocks"]
    octavo, peer = result["octavo"], result["llama.cpp"]
    num_tokens = octavo["tokens_per_s"] * octavo["seconds"]
    first = octavo["tokens_per_s_first"]
    return first, first * bound_s / num_tokens, peer["tokens_per_s_max"]


def gpu_figures(name: str, workload: str, model: str = "", rates: str = "") -> tuple[float, float, float | None]:
    """First run's figure in its unit, its share of the bound, and vLLM's first run of the same call, or None.

    Args:
        name: of a file of gpu_serving.py, or of gpu_int4.py, which needs the two others.
        workload: a key of WORKLOADS.
        model: whose rows of gpu_int4.py's file count.
        rates: the file that has the bandwidth and operations per second of the same call.
    """
    report, work = load(name), WORKLOADS[workload]()
    if model:
        (result,) = (r for r in report["results"] if (r["model"], r["workload"]) == (model, workload))
        machine = load(rates)
        bandwidth, flops = machine["copy_bytes_per_s"], machine["matrix_flops"]
        bound = bound_s(model, work, bandwidth, flops, 2, INT4_BYTES)
    else:
        result = report["results"][workload]
        bound = run_bound_s(report, work)
    first = result["seconds"][0]
    peer = result["vllm"]
    return work.rate(first), bound / first, peer and peer["first_rate"]


def number(value: float | None, unit: str = "") -> str:
    """A figure as people write it, or nothing; unit is "%", "ms" or none."""
    if value is None:
        return ""
    if unit == "%":
        return f"{value:.0%}".replace("%", " %")
    return f"{value:.1f} ms" if unit == "ms" else f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def cells(figures: Sequence[float | None], unit: str = "") -> list[str]:
    """Cells of Octavo's figure, its share of the bound and the peer's figure."""
    octavo, share, peer = figures
    return [number(octavo, unit), number(share, "%"), number(peer, unit)]


def files(*names: str) -> str:
    return "\n\nFiles: " + ", ".join(f"`{name}`" for name in names) + "."


# What, result file, workload, peer: README's six rows, each beside a peer in the same call.
HEADLINES = (
    ("2 CPU cores, SmolLM2-135M: one request", "amd-epyc-zen5-2core-6a40f8e-cpu_throughput", "single", "llama.cpp"),
    ("the same: 32 requests behind 512 common tokens", "amd-epyc-zen5-2core-6a40f8e-cpu_throughput", "shared32", "llama.cpp"),
    ("H200, Qwen3-0.6B: 256 requests behind 4,096 common tokens", "h200-2c96888-gpu_serving-0.6b", "shared", "vLLM"),
    ("the same: 256 requests that share nothing", "h200-2c96888-gpu_serving-0.6b", "nano", "vLLM"),
    ("H200, Qwen3-8B in fp8: 128 requests", "h200-1f19b61-gpu_serving-8b-weights-fp8", "mid", "vLLM"),
    ("H200, gpt-oss-20b: one request", "h200-1f19b61-gpu_serving-gpt-oss-20b", "single", "vLLM"),
)  # fmt: skip


def headlines() -> list[tuple[str, str, float, float, float, str]]:
    """README's rows: what, file, Octavo, its share of the bound, the peer, the peer's name."""
    rows = []
    for what, name, workload, peer in HEADLINES:
        octavo, share, other = (gpu_figures if "gpu" in name else cpu_figures)(name, workload)
        assert other is not None
        rows.append((what, name, octavo, share, other, peer))
    return rows


def readme() -> str:
    rows = [
        [what, number(octavo), f"{number(other)} ({peer})", number(octavo / share), number(share, "%")]
        for what, _, octavo, share, other, peer in headlines()
    ]
    names = dict.fromkeys(name for _, name, *_ in headlines())
    return table(["output tokens/s", "Octavo", "peer", "bound", "reached"], rows) + files(*names)


def cpu() -> str:
    name = "amd-epyc-zen5-2core-6a40f8e-cpu_throughput"
    rows = [[what, *cells(cpu_figures(name, workload))] for workload, what in CPU_WORKLOADS.items()]
    return table(["tokens/s", "Octavo", "of the bound", "llama.cpp"], rows) + files(name)


def cpu_gpt_oss() -> str:
    name = "amd-epyc-zen5-2core-24layers-2333d70-cpu_gpt_oss"
    results, rows = load(name)["results"], []
    for workload, what in (("single", "one request"), ("batch8", "eight at once")):
        octavo, peer = results[workload]["octavo"][0], results[workload]["llama.cpp"][0]
        share = octavo["tokens_per_s"] / results[workload]["bound"]
        memory = (f"{octavo['peak_gib']:.1f}", f"{peer['peak_gib']:.1f}")
        rows.append([what, *cells((octavo["tokens_per_s"], share, peer["tokens_per_s"])), *memory])
    header = ["tokens/s", "Octavo", "of the bound", "llama.cpp", "GiB", "llama.cpp's"]
    return table(header, rows) + files(name)


def small_model() -> str:
    name = "h200-2c96888-gpu_serving-0.6b"
    rows = [
        [what, *cells(gpu_figures(name, workload), WORKLOADS[workload]().unit)]
        for workload, what in GPU_WORKLOADS.items()
    ]
    return table(["tokens/s", "Octavo", "of the bound", "vLLM 0.26"], rows) + files(name)


def models(machine: str, cases: Sequence[tuple[str, str, str]], rates: str) -> str:
    """Models beside vLLM: one request, and 128, of one commit.

    Args:
        machine: machine and commit.
        cases: name of a row; end of the file's name; the model where gpu_int4.py made it, else nothing.
        rates: end of the name of the file with the machine's rates, for gpu_int4.py's.
    """
    rows = []
    for what, end, model in cases:
        both = [gpu_figures(f"{machine}-{end}", w, model, f"{machine}-{rates}") for w in ("single", "mid")]
        # Nothing shows that vLLM's int4 ran quantised: it was no faster than its bfloat16.
        both = [(octavo, share, None if model else peer) for octavo, share, peer in both]
        rows.append([what, *cells(both[0]), *cells(both[1])])
    header = ["first run, tokens/s", "one request", "of the bound", "vLLM", "128 requests", "of the bound", "vLLM"]
    return table(header, rows) + files(f"{machine}-gpu_*")


def h200_models() -> str:
    cases = (
        ("Qwen3-8B, fp8", "gpu_serving-8b-weights-fp8", ""),
        ("Qwen3-8B, int4", "gpu_int4-engine", "8b"),
        ("Qwen3-30B-A3B, bf16", "gpu_serving-30b-a3b", ""),
        ("Qwen3-30B-A3B, fp8", "gpu_serving-30b-a3b-weights-fp8", ""),
        ("Qwen3-30B-A3B, int4", "gpu_int4-engine-30b-a3b", "30b-a3b"),
        ("gpt-oss-20b, MXFP4", "gpu_serving-gpt-oss-20b", ""),
    )
    return models("h200-1f19b61", cases, "gpu_serving-30b-a3b")


def h100_models() -> str:
    cases = (
        ("Qwen3-8B, fp8", "gpu_serving-8b-weights-fp8", ""),
        ("Qwen3-8B, int4", "gpu_int4", "8b"),
        ("Qwen3-30B-A3B, bf16", "gpu_serving-30b-a3b", ""),
        ("gpt-oss-20b, MXFP4", "gpu_serving-gpt-oss-20b", ""),
    )
    return models("h100-4b7d414", cases, "gpu_serving-30b-a3b")


def open_loop() -> str:
    name = "h200-7932823-gpu_open_loop-8b"
    engines = load(name)["engines"]
    rows = [
        [what, *(" / ".join(f"{engines[e]['runs'][0][key][p]:.0f}" for p in ("p50", "p90", "p99")) for e in ("Octavo", "vllm"))]
        for what, key in (("first token", "ttft_ms"), ("between tokens", "inter_token_ms"))
    ]  # fmt: skip
    rows.append(["ready, first start", *(f"{engines[e]['ready_s']:.0f} s" for e in ("Octavo", "vllm"))])
    return table(["ms, p50 / p90 / p99", "Octavo", "vLLM 0.26"], rows) + files(name)


def gpu_http() -> str:
    name = "h200-7932823-gpu_serve-0.6b-4-clients"
    loads = {
        "1 streams": "1 stream", "32 streams": "32 streams", "256 streams": "256 streams",
        "shared": "256 behind 4,096 common tokens",
    }  # fmt: skip
    rows = []
    for key, what in loads.items():
        # Best of two runs, by tokens per second.
        best = [max(load(name)["servers"][e]["loads"][key], key=lambda run: run["output_throughput"]) for e in ("Octavo", "vLLM")]  # fmt: skip
        rows.append([what, *(number(b["output_throughput"]) for b in best), *(f"{b['median_ttft_ms']:,.0f}" for b in best)])  # fmt: skip
    return table(["tokens/s over HTTP", "Octavo", "vLLM 0.26", "first token, ms", "vLLM's"], rows) + files(name)


def forest() -> str:
    name = "h200-7d5c172-gpu_forest"
    results, rows = load(name)["results"], []
    for workload in dict.fromkeys(result["workload"] for result in results):
        by_impl = {result["impl"]: result for result in results if result["workload"] == workload}
        octavo = by_impl["octavo forest"]
        cascade = min(result["us"] for impl, result in by_impl.items() if "cascade" in impl)
        times = (octavo["us"], by_impl["fa3 flat"]["us"], cascade)
        rows.append([workload, *(f"{us:.0f}" for us in times), number(octavo["of_bound"], "%")])
    header = ["us", "Octavo", "FlashAttention-3", "FlashInfer cascade", "of the bound"]  # fmt: skip
    return table(header, rows) + files(name)


def ops() -> str:
    name = "h200-bc264d7-gpu_ops"
    summary = load(name)["summary"]
    rows = [
        [what, summary[key]["rows"], f"{summary[key]['geometric_mean']:.2f}", f"{summary[key]['least']:.2f}"]
        for what, key in (("decode, paged", "decode paged"), ("prefill, paged", "prefill paged"), ("prefill, dense", "prefill dense"), ("prefill, ragged", "prefill ragged"))
    ]  # fmt: skip
    return table(["times as fast as FlashAttention-3", "shapes", "geometric mean", "least"], rows) + files(name)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme, "cpu": cpu, "cpu-gpt-oss": cpu_gpt_oss, "small-model": small_model,
    "h200-models": h200_models, "h100-models": h100_models, "open-loop": open_loop,
    "gpu-http": gpu_http, "forest": forest, "ops": ops,
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def made() -> dict[Path, str]:
    """What each page and the chart should hold."""
    shares = [(what, peer, share, share * other / octavo) for what, _, octavo, share, other, peer in headlines()]
    return {path: filled(path.read_text()) for path in PAGES} | {CHART: draw(shares)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if something would change")
    check = parser.parse_args().check
    changed = [path for path, text in made().items() if not path.exists() or path.read_text() != text]
    for path in changed:
        if not check:
            path.write_text(made()[path])
        print(path.relative_to(ROOT), "is out of date" if check else "written")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
