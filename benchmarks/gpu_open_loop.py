"""Latency under load on one NVIDIA GPU: requests arrive at random, from the moment the engine is ready.

Arrivals are a Poisson process with a fixed seed; lengths of prompts and outputs are uniform, token ids are
random, temperature 0.6, no detokenising. Prints, over the run and by quarter, time to first token (from the
time a request is due) and inter-token latency; then steps, stalls (steps over 50 ms), pauses (some request
waits longer than 50 ms for its next token), tokens per second, start-up, and the share of the bound that the
median inter-token latency reaches. A decode step's bound is the bytes of all weights and of live keys and
values (the run's mean) at the measured copy bandwidth; prompts that share its steps are not in it.

Each engine runs in a fresh process: vLLM first if it is there, then Octavo, then Octavo again, whose kernels
are then compiled, once for every --max-step-ms ("none": no limit; default: the engine's own). --closed runs a
workload of gpu_serving.py afterwards, all its requests at once and each read token by token. --special then
adds a request for one option after the other to 64 that decode, and prints the longest step of each. The last
line is JSON.

    python benchmarks/gpu_open_loop.py [--model 0.6b] [--rate 40] [--seconds 15] [--seed 0] [--repeat 1]
                                        [--peer none] [--cold] [--special] [--closed nano]
                                        [--max-step-ms 10 none]
                                        [--prompt-len 50 4500] [--output-len 20 400]
                                        [--save MACHINE] [--commit ID]
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

import torch
from peers.vllm_serving import measure_in_child
from support.child import run_child
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES, step_bytes
from support.gpu_timing import copy_bandwidth
from support.gpu_workloads import WORKLOADS
from support.open_loop import STALL_S, poisson_arrivals, summarise
from support.open_loop_engine import closed_loop, measure_special, serve

Figures = dict[str, Any]
_PERCENTILES = ("p50", "p90", "p99", "max")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="0.6b", help="tiny: to try the script")
    parser.add_argument("--rate", type=float, default=40, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15, help="time in which requests arrive")
    parser.add_argument("--prompt-len", type=int, nargs=2, default=[50, 4500], metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=[20, 400], metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="runs one after the other on each engine")
    parser.add_argument("--peer", choices=["vllm", "none"], default="vllm" if find_spec("vllm") else "none")
    parser.add_argument("--max-step-ms", nargs="+", default=[], metavar="MS", help="EngineConfig's option")
    parser.add_argument("--closed", choices=WORKLOADS, help="tokens/s of this workload, too")
    parser.add_argument("--cold", action="store_true", help="give Octavo an empty kernel cache at first")
    parser.add_argument("--special", action="store_true", help="first use of each sampling option")
    parser.add_argument("--limit", type=float, default=420, help="most seconds of one engine's process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_engine(json.loads(arguments.child))), flush=True)
        return
    report = measure(arguments)
    print_report(report)
    publish(f"gpu_open_loop-{arguments.model}", report, arguments)


def measure(arguments: argparse.Namespace) -> Figures:
    """Run every engine in its own process, then measure the bandwidth, alone on the GPU."""
    names = ("model", "rate", "seconds", "seed", "prompt_len", "output_len", "repeat")
    settings = {name: getattr(arguments, name) for name in names}
    engines: Figures = {}
    if arguments.peer == "vllm":
        engines["vllm"] = measure_in_child("open_loop", settings, arguments.limit)
    starts: dict[str, Figures] = {"Octavo": {}, "Octavo, started again": {}}
    if arguments.max_step_ms:
        del starts["Octavo, started again"]
    for limit in arguments.max_step_ms:
        value = None if limit == "none" else float(limit)
        starts[f"Octavo, max_step_ms {limit}"] = {"max_step_ms": value}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in starts.items():
            if arguments.cold:
                options["kernel_cache_dir"] = folder
            child = {**settings, "options": options, "special": arguments.special, "closed": arguments.closed}
            engines[name] = run_child([__file__, "--child", json.dumps(child)], arguments.limit)
    bandwidth = copy_bandwidth() if torch.cuda.is_available() else None
    engines = {name: engine for name, engine in engines.items() if engine is not None}
    if bandwidth is not None and arguments.model in SHAPES:
        for engine in engines.values():
            add_bounds(engine, arguments.model, bandwidth)
    return {
        **settings,
        "max_step_ms": arguments.max_step_ms,
        "cold": arguments.cold,
        "copy_bytes_per_s": bandwidth,
        "engines": engines,
    }


def measure_engine(settings: Figures) -> Figures:
    """Load the engine and answer requests that arrive over time, from the moment it is ready."""
    from support.gpu_model import load

    names = ("rate", "seconds", "seed", "prompt_len", "output_len")
    arrivals = poisson_arrivals(**{name: settings[name] for name in names})
    options = settings["options"]
    if settings["model"] == "tiny":
        options = {**options, "num_blocks": 4096}
    start = time.perf_counter()
    llm = load(settings["model"], **options)
    ready = {"ready_s": time.perf_counter() - start, "ready_at": time.time()}
    runs = []
    for number in range(settings["repeat"]):
        if number:
            llm.reset_prefix_cache()
        trace = serve(llm.engine, arrivals)
        runs.append(summarise(arrivals, trace, settings["seconds"]))
        print(f"run {number + 1}: TTFT {runs[-1]['ttft_ms']} ms", file=sys.stderr, flush=True)
    figures = {**ready, "runs": runs, "late_work": llm.stats.late_work._asdict()}
    if settings["closed"]:
        figures["closed_tokens_per_s"] = closed_loop(llm.engine, WORKLOADS[settings["closed"]]())
    if settings["special"]:
        figures["special"] = measure_special(llm.engine)
        figures["late_work_after_special"] = llm.stats.late_work._asdict()
    return figures


def add_bounds(engine: Figures, size: str, bandwidth: float) -> None:
    """Add to each run a decode step's bound, and the share that the median inter-token latency reaches."""
    for run in engine["runs"]:
        run["decode_bound_ms"] = step_bytes(size, round(run["mean_kv_tokens"])) / bandwidth * 1e3
        if run["inter_token_ms"] is not None:
            run["of_bound"] = run["decode_bound_ms"] / run["inter_token_ms"]["p50"]


def print_report(report: Figures) -> None:
    """Print a column for each run of each engine, then the steps that met an option for the first time."""
    columns = {}
    for name, engine in report["engines"].items():
        label = f"vLLM {engine['version']}" if name == "vllm" else name
        for number, run in enumerate(engine["runs"], start=1):
            columns[f"{label}, run {number}"] = describe(engine, run)
    rows = list(next(iter(columns.values())))
    print(table(["figure", *columns], [[row, *(cells[row] for cells in columns.values())] for row in rows]))
    for name, engine in report["engines"].items():
        if engine.get("special"):
            print(f"\n{name}: longest step at the first use of an option, and plain steps before it;")
            print(f"late work by then: {engine['late_work_after_special']}")
            special = [[_number(value) for value in row.values()] for row in engine["special"]]
            print(table(list(engine["special"][0]), special))


def describe(engine: Figures, run: Figures) -> dict[str, str]:
    """A run's cells, by the names of the table's rows."""
    steps, pauses, limit = run["steps"], run["pauses"], f"{STALL_S * 1e3:.0f} ms"
    cells = {
        "ready s (from process start)": f"{engine['ready_s']:.1f} ({engine['process_ready_s']:.1f})",
        "output tokens/s": f"{run['output_tokens_per_s']:,.0f}",
        "closed loop, tokens/s": f"{engine.get('closed_tokens_per_s', 0):,.0f}",
        "TTFT ms: p50 / p90 / p99 / max": _percentiles(run["ttft_ms"]),
    }
    for number, quarter in enumerate(run["ttft_ms_by_quarter"], start=1):
        cells[f"TTFT ms, quarter {number}"] = _percentiles(quarter)
    cells["inter-token ms: p50 / p90 / p99 / max"] = _percentiles(run["inter_token_ms"])
    for number, quarter in enumerate(run["inter_token_ms_by_quarter"], start=1):
        cells[f"inter-token ms, quarter {number}"] = _percentiles(quarter)
    bound = f"{run['decode_bound_ms']:.2f} ms ({run['of_bound']:.0%})" if "of_bound" in run else "-"
    cells["decode step bound (of it reached)"] = bound
    cells[f"pauses over {limit}: number (s)"] = f"{pauses['number']} ({pauses['seconds']:.2f})"
    if steps:
        cells[f"stalls, steps over {limit}: number (s)"] = f"{steps['stalls']} ({steps['stalled_s']:.2f})"
        cells["step ms: median / longest"] = f"{steps['median_ms']:.1f} / {steps['longest_ms']:.1f}"
    else:
        cells |= {f"stalls, steps over {limit}: number (s)": "-", "step ms: median / longest": "-"}
    late = " / ".join(str(number) for number in engine.get("late_work", {}).values())
    cells["late work: compiled / captured / allocated"] = late or "-"
    cells["last request added late ms"] = f"{run['last_added_late_s'] * 1e3:.1f}"
    cells["done s after the last arrival"] = f"{run['seconds_after_last_arrival']:.2f}"
    return cells


def _percentiles(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else " / ".join(f"{figures[name]:.1f}" for name in _PERCENTILES)


def _number(value: object) -> object:
    return f"{value:.1f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
