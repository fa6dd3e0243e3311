"""Where the time of one step goes on an NVIDIA GPU, at several batch sizes.

Steps decode; with --prompts, each also reads a new prompt of that many tokens.

Prints, per step: wall time; the host's own work, which is all but waiting for the device; the time in which
at least one kernel runs, from a profile of further steps; the share of the wall time in which none runs;
kernel launches; calls that wait for the whole device or stream (there must be none); the bound, which is
weights and KV cache read once at the measured copy bandwidth, or the step's operations at the measured rate
of large GEMMs if that takes longer; and the kernels that take most, each from the end of the one before to
its own. The last line is JSON.

    python benchmarks/gpu_step.py [--model 0.6b] [--quantization fp8] [--batches 1,16,64,256] [--context 512]
                                  [--prompts 0,2048] [--kernels 16] [--save MACHINE]
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES, step_bytes, step_operations
from support.gpu_model import load
from support.gpu_timing import copy_bandwidth, matrix_flops

from octavo import LLM, SamplingParams
from octavo.engine.step.result import StepResult
from octavo.engine.step.scheduled import SchedulerOutput

_NUM_PROFILED = 20
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--quantization", choices=["auto", "fp8"], default="auto", help="of weights")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", default="0", help="tokens of the prompt that each step reads")
    parser.add_argument("--kernels", type=int, default=0, help="list the N kernels that take most time")
    arguments = parser.parse_args()
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    llm = load(arguments.model, quantization=arguments.quantization)
    weight_bytes = 1 if arguments.quantization == "fp8" else 2
    results = []
    for batch, prompt in product(*(map(int, x.split(",")) for x in (arguments.batches, arguments.prompts))):
        result, kernels = measure(llm, batch, arguments.context, prompt)
        context = arguments.context
        read = step_bytes(arguments.model, context * batch, weight_bytes=weight_bytes, num_tokens=batch)
        seconds = read / bandwidth
        if prompt:
            operations = step_operations(arguments.model, batch, context, prompt)
            seconds = max(seconds, operations * weight_bytes / 2 / flops)
        results.append({**result, "bound_us": seconds * 1e6})
        for name, (count, us) in kernels.most_common(arguments.kernels):
            print(f"  batch {batch}, prompt {prompt}: {us:8.1f} us in {count:5.1f} launches  {name[:90]}")
    header = [
        "batch",
        "prompt",
        "wall us",
        "host us",
        "kernels us",
        "GPU idle",
        "launches",
        "syncs",
        "bound us",
        "of bound",
    ]
    rows = [
        [
            *(r["batch"], r["prompt"], *(f"{r[key]:.0f}" for key in ("wall_us", "host_us", "gpu_us"))),
            f"{max(0.0, 1 - r['gpu_us'] / r['wall_us']):.0%}",
            *(f"{r['launches']:.0f}", r["syncs"], f"{r['bound_us']:.0f}"),
            f"{r['bound_us'] / r['wall_us']:.0%}",
        ]
        for r in results
    ]
    print(table(header, rows))
    report: dict[str, object] = {
        "model": arguments.model,
        "quantization": arguments.quantization,
        "context": arguments.context,
        "copy_bytes_per_s": bandwidth,
        "results": results,
    }
    weights = "" if arguments.quantization == "auto" else f"-weights-{arguments.quantization}"
    publish(f"gpu_step-{arguments.model}{weights}", report, arguments)


class Kernels(dict[str, tuple[float, float]]):
    """Per kernel (launches, microseconds) of a step: together the time in which some kernel runs."""

    def most_common(self, num: int) -> list[tuple[str, tuple[float, float]]]:
        """The kernels that take most time."""
        return sorted(self.items(), key=lambda item: -item[1][1])[:num]


def measure(llm: LLM, batch: int, context: int, prompt: int) -> tuple[dict[str, float], Kernels]:
    """Figures of a step in the middle of a run, and its kernels."""
    params = SamplingParams(temperature=0.6, max_tokens=128, ignore_eos=True, detokenize=False)
    for row in range(batch):
        llm.engine.add_request([(row * 7 + i) % 10000 for i in range(context)], params)
    waits: list[float] = []
    _time_waits(llm, waits)
    walls, hosts = [], []
    for _ in range(80):
        waits.clear()
        _add_prompt(llm, prompt)
        start = time.perf_counter()
        llm.engine.step()
        walls.append(time.perf_counter() - start)
        hosts.append(walls[-1] - sum(waits))
    gpu_us, kernels, syncs = _profile(llm, prompt)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    del llm.engine.runner.launch
    figures = {
        "batch": batch,
        "prompt": prompt,
        "wall_us": statistics.median(walls[-40:]) * 1e6,
        "host_us": statistics.median(hosts[-40:]) * 1e6,
        "gpu_us": gpu_us,
        "launches": sum(count for count, _ in kernels.values()),
        "syncs": syncs,
    }
    return figures, kernels


def _add_prompt(llm: LLM, length: int) -> None:
    """Add a request that ends with its first token, with a prompt that no other one begins like."""
    if length:
        prompt = np.random.randint(10000, size=length).tolist()
        llm.engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False))


def _time_waits(llm: LLM, waits: list[float]) -> None:
    """Make the runner note how long the engine waits for each result."""
    runner: Any = llm.engine.runner
    launch = runner.launch

    def timed_launch(step: SchedulerOutput) -> Callable[[], StepResult]:
        wait = launch(step)

        def timed() -> StepResult:
            start = time.perf_counter()
            result = wait()
            waits.append(time.perf_counter() - start)
            return result

        return timed

    runner.launch = timed_launch


def _profile(llm: LLM, prompt: int) -> tuple[float, Kernels, int]:
    """Microseconds in which some kernel runs, the kernels, and synchronising calls, per step.

    A kernel may start, and wait, while the one before runs: its time begins when that one ends.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_NUM_PROFILED):
            _add_prompt(llm, prompt)
            llm.engine.step()
    launches, syncs = [], 0
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            launches.append((event.time_range.end, event.time_range.start, event.name))
        syncs += event.name in _SYNCHRONISING
    counts: Counter[str] = Counter()
    times: dict[str, float] = defaultdict(float)
    reached = float("-inf")
    for end, start, name in sorted(launches):
        counts[name] += 1
        times[name] += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    # The profiler itself waits once for the device, at its end.
    kernels = Kernels({name: (counts[name] / _NUM_PROFILED, times[name] / _NUM_PROFILED) for name in counts})
    return sum(times.values()) / _NUM_PROFILED, kernels, max(0, syncs - 1)


if __name__ == "__main__":
    main()
