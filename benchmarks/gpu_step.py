"""One decode step on an NVIDIA GPU at several batch sizes: wall time, and GPU time of its graph.

Prints microseconds per step; the last line is JSON. The GPU time is that of the captured graph replayed by
itself; the rest of the wall time is the host scheduling, sampling and processing while the GPU waits.

    python benchmarks/gpu_step.py [--model 0.6b] [--batches 1,16,64,256] [--context 512] [--save MACHINE]
"""

import argparse
import json
import statistics
import time

import torch
from common import machine, save, table
from gpu_serving import SHAPES, load

from octavo import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--save", metavar="MACHINE")
    arguments = parser.parse_args()
    llm = load(arguments.model)
    results = [measure(llm, int(batch), arguments.context) for batch in arguments.batches.split(",")]
    rows = [
        [r["batch"], f"{r['wall_us']:.0f}", f"{r['gpu_us']:.0f}", f"{1 - r['gpu_us'] / r['wall_us']:.0%}"]
        for r in results
    ]
    print(table(["batch", "wall us/step", "graph us/step", "GPU idle or sampling"], rows))
    report: dict[str, object] = {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "model": arguments.model,
        "context": arguments.context,
        "results": results,
    }
    if arguments.save:
        print("saved", save("gpu_step", report, arguments.save))
    print(json.dumps(report))


def measure(llm: LLM, batch: int, context: int) -> dict[str, float]:
    """Median wall time of decode steps, and the GPU time of the graph they replay."""
    params = SamplingParams(temperature=0.6, max_tokens=64, ignore_eos=True, detokenize=False)
    for row in range(batch):
        llm.engine.add_request([(row * 7 + i) % 10000 for i in range(context)], params)
    times = []
    while llm.engine.has_unfinished_requests:
        start = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - start)
    graphs = llm.engine.runner.graphs
    assert graphs is not None, "the engine runs without CUDA graphs"
    return {
        "batch": batch,
        "wall_us": statistics.median(times[-50:-2]) * 1e6,
        "gpu_us": graphs.replay_us(batch),
    }


if __name__ == "__main__":
    main()
