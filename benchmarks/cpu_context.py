"""Milliseconds to decode one token on a CPU, by the length of its context, 512 to 8,192 tokens.

The time must grow linearly: attention reads every cached token once, and nothing else depends on the length.
Prints a table beside Hugging Face transformers on the same contexts, and beside the memory bound, which is
weights and KV cache read once at the measured bandwidth. The last line is JSON.

    python benchmarks/cpu_context.py [--contexts 512,1024,2048,4096,8128] [--tokens 32] [--save MACHINE]
"""

import statistics
import time
from itertools import pairwise
from random import Random
from typing import Any

import torch
from peers.hf_smollm2 import load_smollm2
from support.common import make_parser, publish, read_bandwidth, table, wait_until_idle
from support.cpu_workloads import END_ID, LOWEST_ID

from octavo import LLM, SamplingParams

WEIGHT_BYTES, KV_BYTES = 134.5e6 * 4, 46080


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", default="512,1024,2048,4096,8128")
    parser.add_argument("--tokens", type=int, default=32)
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
        "load_before": load,
        "contexts": contexts,
        "octavo_ms": octavo,
        "hf_ms": hf,
        "bound_ms": bounds,
        "slope_ms_per_1000": slope * 1000,
        "worst_deviation": worst,
    }
    publish("cpu_context", report, arguments)


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
