"""CPU: cost of one decoded token against the length of its context, 512 to 8,192 tokens.

The cost must grow linearly: attention reads every cached token once, and no bookkeeping looks at the whole
sequence again. Prints a table with the memory bound beside it (weights and KV read once at the measured
bandwidth); the last line is JSON. The peer is Hugging Face transformers on the same contexts.

    python benchmarks/cpu_context.py [--contexts 512,1024,2048,4096,8128] [--tokens 32] [--save MACHINE]
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from random import Random
from typing import Any

import torch
from common import machine, read_bandwidth, save, table, wait_until_idle
from hf_model import load_smollm2
from workloads import END_ID, LOWEST_ID

from octavo import LLM, SamplingParams

WEIGHT_BYTES, KV_BYTES = 134.5e6 * 4, 46080


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", default="512,1024,2048,4096,8128")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--save", metavar="MACHINE")
    arguments = parser.parse_args()
    contexts = [int(context) for context in arguments.contexts.split(",")]
    load, bandwidth = wait_until_idle(), read_bandwidth()
    llm, model = LLM("smollm2"), load_smollm2()
    octavo = [octavo_ms(llm, context, arguments.tokens) for context in contexts]
    hf = [hf_ms(model, context, arguments.tokens) for context in contexts]
    bounds = [(WEIGHT_BYTES + context * KV_BYTES) / bandwidth * 1000 for context in contexts]
    rows = [
        [context, f"{ours:.1f}", f"{theirs:.1f}", f"{bound:.1f}", f"{bound / ours:.0%}"]
        for context, ours, theirs, bound in zip(contexts, octavo, hf, bounds, strict=True)
    ]
    print(table(["context", "Octavo ms/token", "Hugging Face ms/token", "bound ms", "fraction"], rows))
    slope, intercept = statistics.linear_regression(contexts, octavo)
    worst = max(abs(slope * c + intercept - ms) / ms for c, ms in zip(contexts, octavo, strict=True))
    print(
        f"line: {intercept:.1f} ms + {slope * 1000:.2f} ms per 1,000 tokens; worst point off by {worst:.0%}"
    )
    report: dict[str, object] = {
        "machine": machine(),
        "load_before": load,
        "contexts": contexts,
        "octavo_ms": octavo,
        "hf_ms": hf,
        "bound_ms": bounds,
        "slope_ms_per_1000": slope * 1000,
        "worst_deviation": worst,
    }
    if arguments.save:
        print("saved", save("cpu_context", report, arguments.save))
    print(json.dumps(report))


def ids(num: int) -> list[int]:
    rng = Random(num)
    return [rng.randrange(LOWEST_ID, END_ID) for _ in range(num)]


def octavo_ms(llm: LLM, context: int, num_tokens: int) -> float:
    """Median milliseconds of a decode step right after a prompt of `context` tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    times = [time.perf_counter() for _ in llm.stream(ids(context), params)]
    return statistics.median(after - before for before, after in pairwise(times[1:])) * 1000


@torch.inference_mode()
def hf_ms(model: Any, context: int, num_tokens: int) -> float:
    """The same for Hugging Face transformers."""
    out = model(torch.tensor([ids(context)]), use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(num_tokens):
        start = time.perf_counter()
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1000


if __name__ == "__main__":
    main()
