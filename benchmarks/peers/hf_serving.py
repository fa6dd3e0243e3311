"""The peer of GPU serving: Hugging Face transformers generate() on the same requests and shapes.

It runs as users run it: bfloat16, scaled_dot_product_attention, static batches of up to 64 sequences with
prompts of similar length, padded on the left, each batch up to its longest output. Only tokens asked for
count.
"""

import time
from typing import Any

import torch
from support.common import left_padded
from support.gpu_workloads import Workload

MAX_SEQUENCES = 64
LABEL = f"HF transformers generate, batches of {MAX_SEQUENCES}"


def measure_peer(
    config: dict[str, Any], workloads: dict[str, Workload], *, device: str = "cuda", limit_s: float = 60.0
) -> dict[str, dict[str, Any]]:
    """Run every workload on one model with random weights.

    Args:
        config: fields of config.json.
        workloads: by name.
        device: where the model runs.
        limit_s: seconds for each workload; only the batches that fit run, and the figures say how many.

    Returns:
        By name: rate in the workload's unit, seconds, num_requests that ran, note for a reader. No rate
        where the device ran out of memory.
    """
    model = build(config, device)
    results = {}
    for name, workload in workloads.items():
        try:
            results[name] = measure(model, workload, limit_s)
        except torch.cuda.OutOfMemoryError:
            results[name] = {"note": "out of memory"}
        torch.cuda.empty_cache()
    return results


def build(config: dict[str, Any], device: str) -> Any:
    """Build a Qwen3 of random weights without an end-of-sequence token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields: dict[str, Any] = {"attn_implementation": "sdpa"}
    fields |= {key: value for key, value in config.items() if key not in ("architectures", "eos_token_id")}
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**fields))
    return model.to(torch.bfloat16).eval()


def measure(model: Any, workload: Workload, limit_s: float) -> dict[str, Any]:
    """Warm up, then take the best of up to three runs, fewer where one takes long."""
    batches = make_batches(workload)
    generate(model, workload, batches[0], 2, limit_s)
    runs = [run(model, workload, batches, limit_s)]
    while len(runs) < 3 and sum(result["seconds"] for result in runs) < min(10, limit_s):
        runs.append(run(model, workload, batches, limit_s))
    return min(runs, key=lambda result: result["seconds"])


def make_batches(workload: Workload) -> list[list[int]]:
    """Cut requests, sorted by prompt length, into batches; medium lengths first, in case time runs out."""
    order = sorted(range(len(workload.prompts)), key=lambda index: len(workload.prompts[index]))
    size = MAX_SEQUENCES // workload.n
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    middle = len(batches) // 2
    return sorted(batches, key=lambda batch: abs(batches.index(batch) - middle))


def run(model: Any, workload: Workload, batches: list[list[int]], limit_s: float) -> dict[str, Any]:
    """Run as many batches as the limit allows; the first one always runs, and is cut off at the limit."""
    seconds, slowest, num_requests, num_tokens = 0.0, 0.0, 0, 0
    for batch in batches:
        if seconds + slowest > limit_s:
            break
        longest = max(workload.max_tokens[index] for index in batch)
        start = time.perf_counter()
        num_new = generate(model, workload, batch, longest, limit_s)
        slowest = max(slowest, time.perf_counter() - start)
        seconds += time.perf_counter() - start
        num_requests += len(batch)
        num_tokens += workload.n * sum(min(workload.max_tokens[index], num_new) for index in batch)
    return {
        "rate": seconds * 1000 if workload.unit == "ms" else num_tokens / seconds,
        "seconds": seconds,
        "num_requests": num_requests,
        "note": _note(workload, num_requests, num_tokens),
    }


def _note(workload: Workload, num_requests: int, num_tokens: int) -> str:
    if num_tokens == workload.num_output_tokens:
        return ""
    return f"{num_tokens} tokens of {num_requests} of {len(workload.prompts)} requests"


def generate(model: Any, workload: Workload, batch: list[int], num_new: int, limit_s: float) -> int:
    """Sample up to num_new tokens for each request of a batch; returns how many the limit allowed."""
    ids, mask = left_padded([workload.prompts[index] for index in batch])
    outputs = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_new,
        max_time=limit_s,
        do_sample=True,
        temperature=0.6,
        top_k=0,
        top_p=1.0,
        num_return_sequences=workload.n,
        pad_token_id=0,
    )
    return outputs.shape[1] - ids.shape[1]
