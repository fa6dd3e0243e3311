"""Milliseconds to decode one token on a CPU, by the length of its context, 512 to 8,128 tokens.

The time must grow linearly: attention reads every cached token once, and nothing else depends on the length.
Prints a table of the embedded model over caches of several dtypes, beside Hugging Face transformers on the
same contexts, in float32, and beside the bound, which is weights and KV cache read once at the measured rate
of memory. The last line is JSON.

    python benchmarks/cpu_context.py [--contexts 512,1024,2048,4096,8128] [--tokens 32]
                                     [--kv-cache-dtypes auto,bf16] [--save MACHINE]
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", default="512,1024,2048,4096,8128")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--kv-cache-dtypes", default="auto,bf16")
    arguments = parser.parse_args()
    contexts = [int(context) for context in arguments.contexts.split(",")]
    load, bandwidth = wait_until_idle(), read_bandwidth()
    engines = {
        dtype: measure(dtype, contexts, arguments.tokens, bandwidth)
        for dtype in arguments.kv_cache_dtypes.split(",")
    }
    model = load_smollm2()
    hf = [hf_ms(model, context, arguments.tokens) for context in contexts]
    header = ["context", *(f"{dtype}: ms, of the bound" for dtype in engines), "Hugging Face ms"]
    rows = [
        [
            contexts[i],
            *(f"{e['ms'][i]:.2f}, {e['bound_ms'][i] / e['ms'][i]:.0%}" for e in engines.values()),
            f"{hf[i]:.1f}",
        ]
        for i in range(len(contexts))
    ]
    print(table(header, rows))
    for dtype, e in engines.items():
        print(
            f"{dtype}: {e['intercept_ms']:.2f} ms + {e['slope_ms_per_1000']:.2f} ms per 1,000 tokens; "
            f"worst point off by {e['worst_deviation']:.0%}"
        )
    publish(
        "cpu_context", {"load_before": load, "contexts": contexts, "engines": engines, "hf_ms": hf}, arguments
    )


def measure(kv_cache_dtype: str, contexts: list[int], num_tokens: int, bandwidth: float) -> dict[str, Any]:
    """Time an engine at all contexts, and fit a line."""
    llm = LLM("smollm2", kv_cache_dtype=kv_cache_dtype)
    plan = llm.engine.plan
    times = [octavo_ms(llm, context, num_tokens) for context in contexts]
    slope, intercept = statistics.linear_regression(contexts, times)
    return {
        "ms": times,
        "bound_ms": [
            (plan.weight_bytes + context * plan.kv_bytes_per_token) / bandwidth * 1000 for context in contexts
        ],
        "slope_ms_per_1000": slope * 1000,
        "intercept_ms": intercept,
        "worst_deviation": max(
            abs(slope * context + intercept - ms) / ms for context, ms in zip(contexts, times, strict=True)
        ),
    }


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
