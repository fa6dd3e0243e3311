"""SmolLM2 over HTTP on this CPU: beside the engine alone, and beside llama.cpp's server on the same file.

For each number of streams, so many requests of the same prompts arrive at once. Each round runs the engine
alone in this process, then Octavo's server, then llama.cpp's, each in a process of its own; the best round of
each counts, since neighbours on the machine only take away. The client is that of `octavo bench serve`; its
CPU time, and that of HTTP, come out of the same cores. Prints tokens per second, the share of the engine's
that HTTP leaves, time to first token and inter-token latency. The last line is JSON.

    python benchmarks/cpu_serving.py [--streams 1 4 16 32] [--input-len 64] [--output-len 32] [--repeat 3]
                                     [--llama PYTHON] [--save MACHINE]

--llama is a Python that has llama-cpp-python[server]. Its requests are text, one at a time: the server has no
more places.
"""

import argparse
import os
import time
from contextlib import ExitStack
from typing import Any

import torch
from support.common import make_parser, publish, table
from support.http_load import Figures, ServerProcess, free_port

from octavo import LLM, SamplingParams
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.workload import make_prompts
from octavo.config import DEFAULT_MODEL
from octavo.models import resolve_model

_LIMIT_S = 120.0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python[server]")
    arguments = parser.parse_args()
    report = measure(arguments)
    print_report(report)
    publish("cpu_serving", report, arguments)


def measure(arguments: argparse.Namespace) -> Figures:
    """Run all rounds; of each engine and number of streams the best one stays."""
    best: dict[str, dict[int, Figures]] = {}
    with ExitStack() as stack:
        llm = LLM()
        servers = {"Octavo over HTTP": stack.enter_context(octavo_server())}
        if arguments.llama:
            servers["llama.cpp over HTTP"] = stack.enter_context(llama_server(arguments.llama))
        for num_streams in arguments.streams:
            for number in range(arguments.repeat):
                fields = workload(arguments, num_streams, seed=number)
                runs = {"engine alone": engine_alone(llm, fields)}
                for name, server in servers.items():
                    # llama.cpp's takes no token ids.
                    kind = "words" if name.startswith("llama") else "ids"
                    runs[name] = server.load(**fields, prompt_kind=kind)
                for name, run in runs.items():
                    kept = best.setdefault(name, {}).setdefault(num_streams, run)
                    if run["output_throughput"] > kept["output_throughput"]:
                        best[name][num_streams] = run
        ready = {name: server.ready_s for name, server in servers.items()}
    names = ("streams", "input_len", "output_len", "repeat")
    settings = {name: getattr(arguments, name) for name in names}
    return {**settings, "threads": torch.get_num_threads(), "ready_s": ready, "results": best}


def workload(arguments: argparse.Namespace, num_streams: int, seed: int) -> dict[str, Any]:
    """Fields of LoadOptions: other prompts in each round, or the prefix cache would answer."""
    return {
        "num_prompts": num_streams,
        "input_len": (arguments.input_len,),
        "output_len": (arguments.output_len,),
        "ignore_eos": True,
        "seed": 1000 * num_streams + seed,
    }


def engine_alone(llm: LLM, fields: dict[str, Any]) -> Figures:
    """The same prompts without HTTP."""
    options = LoadOptions(**fields)
    prompts = make_prompts(options, options.num_prompts, options.seed)
    params = SamplingParams(temperature=0, max_tokens=options.output_len[0], ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([prompt.prompt or [] for prompt in prompts], params)
    duration = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "duration": duration,
        "total_output_tokens": num_tokens,
        "output_throughput": num_tokens / duration,
    }


def octavo_server() -> ServerProcess:
    """Octavo with the same engine options as the engine alone: the defaults."""
    port = free_port()
    return ServerProcess(["-m", "octavo", "serve", "--port", str(port), "--quiet"], port, _LIMIT_S)


def llama_server(python: str) -> ServerProcess:
    """llama.cpp's server on the same file and as many threads; a new request does not break off another."""
    port = free_port()
    command = [os.path.abspath(python), "-m", "llama_cpp.server", "--port", str(port)]
    command += ["--model", str(resolve_model(DEFAULT_MODEL).path), "--n_ctx", "2048"]
    command += ["--n_threads", str(torch.get_num_threads()), "--interrupt_requests", "false"]
    return ServerProcess(command, port, _LIMIT_S)


def print_report(report: Figures) -> None:
    """Print a row for each engine and number of streams."""
    rows = []
    for name, by_streams in report["results"].items():
        for num_streams, run in by_streams.items():
            alone = report["results"]["engine alone"][num_streams]
            share = run["output_throughput"] / alone["output_throughput"]
            times = [
                " / ".join(f"{run[f'{which}_{metric}_ms']:.1f}" for which in ("median", "p99"))
                if f"median_{metric}_ms" in run and run[f"median_{metric}_ms"] is not None
                else "-"
                for metric in ("ttft", "itl")
            ]
            rows.append([name, num_streams, f"{run['output_throughput']:.1f}", f"{share:.2f}", *times])
    print(table(["", "streams", "tokens/s", "of engine alone", "TTFT p50/p99 ms", "ITL p50/p99 ms"], rows))


if __name__ == "__main__":
    main()
