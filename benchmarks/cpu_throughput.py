"""CPU throughput of Octavo, Hugging Face generate and llama-cpp-python on the same token ids.

For each workload, each round runs every engine once, one after the other, each in a fresh process that starts
when the machine is idle. Prints medians over the rounds and the first, with physical bounds and the fraction
reached. The last line is JSON.

"octavo" has the model as its file stores it, in 4 and 8 bits, "octavo-float32" as exact numbers, and
"octavo-1-thread" one thread. llama.cpp is measured where llama-cpp-python is installed. With --busy 2, two
processes that compute without end share the cores with each engine while it answers.

    python benchmarks/cpu_throughput.py [--repeat 3] [--engines octavo,hf] [--workloads single] [--busy 2]
        [--save NAME]
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from support.common import (
    block_flops,
    float32_flops,
    left_padded,
    make_parser,
    measure_apart,
    publish,
    read_bandwidth,
    table,
)
from support.cpu_workloads import WORKLOADS, Job

# Options of octavo's engines.
OCTAVO: dict[str, dict[str, Any]] = {
    "octavo": {},
    "octavo-flat": {"share_prefixes": False},
    "octavo-float32": {"quantization": "none"},
    "octavo-bf16": {"quantization": "bf16"},
    "octavo-int8": {"quantization": "int8"},
    "octavo-1-thread": {},
}
ENGINES = (*OCTAVO, "hf", "llama.cpp")
# Of the model: its numbers, its bytes in blocks, numbers of the layers, bytes of a token in the KV cache.
NUM_PARAMETERS, BYTES_IN_BLOCKS, NUM_OF_LAYERS, KV_BYTES = 134.5e6, 96.7e6, 106.2e6, 46080


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the engine")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(run_worker(arguments.worker[0], arguments.worker[1], arguments.busy)))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds of each workload and print the comparison."""
    engines = [name for name in arguments.engines.split(",") if name != "llama.cpp" or find_spec("llama_cpp")]
    float32, blocks = float32_flops(), block_flops()
    bounds = {
        name: {
            "float32": bound_s(WORKLOADS[name](), NUM_PARAMETERS * 4, float32),
            "blocks": bound_s(WORKLOADS[name](), BYTES_IN_BLOCKS, blocks),
        }
        for name in arguments.workloads.split(",")
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for workload, bound in bounds.items():
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
        for _ in range(arguments.repeat):
            for engine in engines:
                runs[engine].append(
                    measure_apart(__file__, "--worker", engine, workload, "--busy", str(arguments.busy))
                )
        results[workload] = {engine: median_of(runs[engine]) for engine in engines}
        print_workload(workload, bound, results[workload])
    name = "cpu_throughput" + (f"-busy{arguments.busy}" if arguments.busy else "")
    publish(name, {"busy": arguments.busy, "bound_s": bounds, "results": results}, arguments)


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure over repetitions, the first rate, and the spread of all."""
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    rates = [run["tokens_per_s"] for run in runs]
    spread = {"tokens_per_s_min": min(rates), "tokens_per_s_max": max(rates)}
    return {**figures, "tokens_per_s_first": rates[0], **spread}


def print_workload(workload: str, bound: dict[str, float], results: dict[str, dict[str, float]]) -> None:
    """Print one workload's table."""
    num_new = sum(job.max_new for job in WORKLOADS[workload]())
    hf = results.get("hf", {}).get("tokens_per_s")
    rows = []
    for engine, figures in results.items():
        rate = figures["tokens_per_s"]
        rows.append(
            [
                engine,
                f"{rate:.1f}",
                f"{figures['tokens_per_s_first']:.1f}",
                f"{figures['tokens_per_s_min']:.1f}-{figures['tokens_per_s_max']:.1f}",
                f"{rate / hf:.2f}x" if hf else "",
                f"{rate * bound['float32'] / num_new:.0%}",
                f"{rate * bound['blocks'] / num_new:.0%}",
                f"{figures['ttft_s'] * 1000:.0f}" if figures["ttft_s"] else "",
                f"{figures['load_s']:.1f}",
                f"{figures['peak_mib']:.0f}",
            ]
        )
    header = ["engine", "tokens/s", "first", "range", "vs HF", "of float32 bound", "of blocks' bound"]
    limits = ", ".join(f"{name} bound {num_new / seconds:.0f} tokens/s" for name, seconds in bound.items())
    header += ["TTFT ms", "load s", "peak MiB"]
    print(f"\n{workload}: {num_new} output tokens; {limits}")
    print(table(header, rows), flush=True)


def bound_s(jobs: list[Job], weight_bytes: float, flops: float) -> float:
    """Seconds that no engine with such weights and products can beat on this machine.

    A decode step reads the weights and each distinct KV token once at the measured bandwidth, or computes at
    the measured peak, whichever takes longer. Prompts run at the peak.
    """
    bandwidth = read_bandwidth()
    prefix = common_prefix(jobs)
    num_prompt = prefix + sum(len(job.prompt) - prefix for job in jobs)
    seconds = num_prompt * 2 * NUM_OF_LAYERS / flops
    for step in range(max(job.max_new for job in jobs) - 1):
        live = [job for job in jobs if job.max_new > step + 1]
        num_kv = prefix + sum(len(job.prompt) - prefix + step for job in live)
        num_bytes = weight_bytes + num_kv * KV_BYTES
        seconds += max(num_bytes / bandwidth, len(live) * 2 * NUM_PARAMETERS / flops)
    return seconds


def common_prefix(jobs: list[Job]) -> int:
    """Number of leading tokens that all prompts have in common; 0 for a single prompt."""
    if len(jobs) == 1:
        return 0
    num = 0
    while all(len(job.prompt) > num and job.prompt[num] == jobs[0].prompt[num] for job in jobs):
        num += 1
    return num


@contextlib.contextmanager
def busy_beside(number: int) -> Iterator[None]:
    """Have some processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run_worker(engine: str, workload: str, busy: int) -> dict[str, float]:
    """Load an engine, warm it up, run the workload; called in a process of its own."""
    from octavo.cli.bench.throughput import peak_rss_mib

    jobs = WORKLOADS[workload]()
    run = {"hf": run_hf, "llama.cpp": run_llama_cpp}.get(engine)
    with busy_beside(busy):
        figures = run(jobs) if run else run_octavo(jobs, engine)
    num_new = sum(job.max_new for job in jobs)
    return {**figures, "tokens_per_s": num_new / figures["seconds"], "peak_mib": peak_rss_mib()}


def run_octavo(jobs: list[Job], engine: str) -> dict[str, float]:
    import torch

    from octavo import LLM, SamplingParams

    if engine == "octavo-1-thread":
        torch.set_num_threads(1)
    start = time.perf_counter()
    llm = LLM("smollm2", **OCTAVO[engine])
    load_s = time.perf_counter() - start

    def params(max_new: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_new, ignore_eos=True, detokenize=False)

    llm.generate([list(range(1000, 1040))], params(4))
    start = time.perf_counter()
    outputs = llm.generate([job.prompt for job in jobs], [params(job.max_new) for job in jobs])
    seconds = time.perf_counter() - start
    ttft = statistics.fmean(output.metrics.time_to_first_token_s or 0.0 for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [job.max_new for job in jobs]
    return {"seconds": seconds, "ttft_s": ttft, "load_s": load_s}


def run_hf(jobs: list[Job]) -> dict[str, float]:
    """Hugging Face generate: one left-padded batch up to its longest output; only tokens asked for count."""
    from peers.hf_smollm2 import load_smollm2

    start = time.perf_counter()
    model: Any = load_smollm2()
    load_s = time.perf_counter() - start
    ids, mask = left_padded([job.prompt for job in jobs])

    def generate(num_new: int) -> None:
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )

    generate(1)
    start = time.perf_counter()
    generate(1)
    ttft = time.perf_counter() - start
    start = time.perf_counter()
    generate(max(job.max_new for job in jobs))
    return {"seconds": time.perf_counter() - start, "ttft_s": ttft, "load_s": load_s}


def run_llama_cpp(jobs: list[Job]) -> dict[str, float]:
    """llama-cpp-python on the quantised file, one request after the other: its Python API does not batch."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    from octavo.models import resolve_model

    start = time.perf_counter()
    path = resolve_model("smollm2").path
    model = Llama(str(path), n_ctx=1024, verbose=False, n_threads=2, n_threads_batch=2)
    load_s = time.perf_counter() - start
    first: list[float] = []
    start = time.perf_counter()
    for job in jobs:
        begin = time.perf_counter()
        for count, _ in enumerate(model.generate(job.prompt, temp=0.0, reset=True), start=1):
            if count == 1:
                first.append(time.perf_counter() - begin)
            if count == job.max_new:
                break
    return {"seconds": time.perf_counter() - start, "ttft_s": statistics.fmean(first), "load_s": load_s}


if __name__ == "__main__":
    main()
