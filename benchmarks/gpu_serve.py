"""HTTP serving on one NVIDIA GPU: Octavo's server beside its engine alone, and beside vLLM's server.

Random weights in Qwen3's shapes, prompts of token ids, temperature 0.6. Both servers get the same folder,
with a stand-in tokenizer, and the same client: that of `octavo bench serve`. First come the workloads of
gpu_serving.py, all requests at once, which the engine alone runs too: what HTTP costs. Then so many streams
at a time, and requests that arrive at random. Each load runs --repeat times with other prompts; the first run
stands beside the best one, as it may meet what is compiled on first use. The last line is JSON.

    python benchmarks/gpu_serve.py [--model 0.6b] [--workloads nano shared] [--streams 1 32 256] [--rate 40]
                                   [--seconds 15] [--prompt-len 512] [--output-len 128] [--repeat 2]
                                   [--processes 1] [--peer none] [--save MACHINE]

vLLM runs as `vllm serve` does by default, without statistics and without FlashInfer's sampler, as in
peers/vllm_serving.py.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.child import run_child
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES
from support.gpu_workloads import WORKLOADS, Workload
from support.http_load import Figures, ServerError, ServerProcess, free_port
from support.model_folder import model_folder, write_tokenizer

_LIMIT_S = 420.0
_MAX_MODEL_LEN = 16384


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="0.6b", help="tiny: to try the script")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=["nano", "shared"])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--rate", type=float, default=40, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15, help="time in which requests arrive")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[512], metavar="LEN")
    parser.add_argument("--output-len", type=int, nargs="+", default=[128], metavar="LEN")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of the client")
    parser.add_argument("--peer", choices=["vllm", "none"], default="vllm" if find_spec("vllm") else "none")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(engine_alone(json.loads(arguments.child))), flush=True)
        return
    report = measure(arguments)
    print_report(report)
    clients = "" if arguments.processes == 1 else f"-{arguments.processes}-clients"
    publish(f"gpu_serve-{arguments.model}{clients}", report, arguments)


def measure(arguments: argparse.Namespace) -> Figures:
    """Run the engine, then each server, one after the other, alone on the GPU."""
    folder = model_folder(arguments.model)
    write_tokenizer(Path(folder))
    settings = {"model": arguments.model, "folder": folder, "workloads": arguments.workloads}
    alone = {}
    if arguments.workloads:
        child = json.dumps({**settings, "repeat": arguments.repeat})
        alone = run_child([__file__, "--child", child], _LIMIT_S)
    commands = {"Octavo": octavo_command(arguments.model, folder)}
    if arguments.peer == "vllm":
        commands["vLLM"] = vllm_command(folder)
    servers = {}
    for name, (command, port) in commands.items():
        try:
            with ServerProcess(command, port, _LIMIT_S) as server:
                servers[name] = {"ready_s": server.ready_s, "loads": run_loads(arguments, server)}
        except ServerError as error:
            if name == "Octavo":
                raise
            print(f"{name} was not measured: {error}", file=sys.stderr, flush=True)
    names = (
        "model",
        "workloads",
        "streams",
        "rate",
        "seconds",
        "prompt_len",
        "output_len",
        "repeat",
        "processes",
    )
    return {**{name: getattr(arguments, name) for name in names}, "engine_alone": alone, "servers": servers}


def engine_alone(settings: Figures) -> Figures:
    """Output tokens per second of each workload in each run, each read token by token."""
    from support.open_loop_engine import closed_loop

    from octavo import LLM

    start = time.perf_counter()
    llm = LLM(settings["folder"], **engine_options(settings["model"]))
    ready = {"ready_s": time.perf_counter() - start, "ready_at": time.time()}
    rates = {
        name: [closed_loop(llm.engine, WORKLOADS[name]()) for _ in range(settings["repeat"])]
        for name in settings["workloads"]
    }
    return {**ready, "output_tokens_per_s": rates}


def engine_options(model: str) -> dict[str, Any]:
    """Octavo's options, of the engine alone and of the server."""
    small = {"num_blocks": 4096} if model == "tiny" else {}
    return {"load_format": "dummy", "max_model_len": _MAX_MODEL_LEN, **small}


# Workloads send all of their prompts at once.
_SERVER_OPTIONS = {"max_num_queued_reqs": 10_000, "max_num_queued_tokens": 100_000_000}


def octavo_command(model: str, folder: str) -> tuple[list[str], int]:
    """The command of Octavo's server, and its port."""
    port = free_port()
    options = engine_options(model) | _SERVER_OPTIONS
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return ["-m", "octavo", "serve", folder, "--quiet", f"--port={port}", *flags], port


def vllm_command(folder: str) -> tuple[list[str], int]:
    """The command of vLLM's server, and its port."""
    port = free_port()
    command = ["-m", "peers.vllm_server", f"--model={folder}", f"--port={port}", "--host=127.0.0.1"]
    command += ["--load-format=dummy", "--dtype=bfloat16", f"--max-model-len={_MAX_MODEL_LEN}"]
    return [*command, "--gpu-memory-utilization=0.9", "--disable-log-stats"], port


def run_loads(arguments: argparse.Namespace, server: ServerProcess) -> dict[str, list[Figures]]:
    """Figures of every run of every load, by the load's name."""
    loads: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in load_fields(arguments, Path(folder)).items():
            # No more than requests under way.
            most = fields.get("max_concurrency", fields["num_prompts"])
            common = {"ignore_eos": True, "temperature": 0.6, "processes": min(arguments.processes, most)}
            loads[name] = [server.load(**fields, **common, seed=number) for number in range(arguments.repeat)]
            for run in loads[name]:
                times = f"TTFT {_ms(run, 'ttft')} ms, ITL {_ms(run, 'itl')} ms"
                rate = f"{run['output_throughput']:,.0f} tokens/s"
                print(f"{name}: {rate}, {times}", file=sys.stderr, flush=True)
                for message in (*run["errors"], *run["warnings"]):
                    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return loads


def load_fields(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Fields of LoadOptions for every load."""
    loads: dict[str, dict[str, Any]] = {}
    for name in arguments.workloads:
        workload = WORKLOADS[name]()
        path = folder / f"{name}.jsonl"
        write_prompts(workload, path)
        loads[name] = {"prompts_file": str(path), "num_prompts": len(workload.prompts)}
    lengths = {"input_len": tuple(arguments.prompt_len), "output_len": tuple(arguments.output_len)}
    for num in arguments.streams:
        loads[f"{num} streams"] = {"num_prompts": 2 * num, "max_concurrency": num, **lengths}
    if arguments.rate:
        num = math.ceil(arguments.rate * arguments.seconds)
        loads[f"{arguments.rate:g} requests/s"] = {
            "num_prompts": num,
            "request_rate": arguments.rate,
            **lengths,
        }
    return loads


def write_prompts(workload: Workload, path: Path) -> None:
    """Write a workload as the client reads it."""
    lines = [
        json.dumps({"prompt": prompt, "max_tokens": num})
        for prompt, num in zip(workload.prompts, workload.max_tokens, strict=True)
    ]
    path.write_text("\n".join(lines))


def print_report(report: Figures) -> None:
    """Print a row for each load and server."""
    rows = []
    alone = report["engine_alone"].get("output_tokens_per_s", {})
    for server, figures in report["servers"].items():
        for load, runs in figures["loads"].items():
            best = max(runs, key=lambda run: run["output_throughput"])
            of_engine = f"{best['output_throughput'] / max(alone[load]):.2f}" if load in alone else ""
            times = (f"{_ms(best, 'ttft')}", f"{_ms(best, 'itl')}", f"{_ms(best, 'tpot')}")
            rate = f"{best['output_throughput']:,.0f} ({runs[0]['output_throughput']:,.0f})"
            rows.append([load, server, rate, of_engine, *times, best["failed"]])
    rows.sort(key=lambda row: list(next(iter(report["servers"].values()))["loads"]).index(row[0]))
    header = ["load", "server", "tokens/s: best (first)", "of engine alone"]
    print(table([*header, "TTFT ms p50/p99", "ITL ms p50/p99", "TPOT ms p50/p99", "failed"], rows))
    print(
        "ready after", {name: round(server["ready_s"], 1) for name, server in report["servers"].items()}, "s"
    )


def _ms(run: Figures, metric: str) -> str:
    values = [run[f"{which}_{metric}_ms"] for which in ("median", "p99")]
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
