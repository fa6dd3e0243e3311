"""Serving workloads on one NVIDIA GPU: random weights with the true shapes, temperature 0.6, no detokenising.

Prints tokens per second (or time to first token) beside the physical bound: bytes at the measured copy
bandwidth plus operations at the measured matrix rate. Recorded figures of vLLM 0.26 on an H200 stand beside
it, named as recorded. The last line is JSON.

    python benchmarks/gpu_serving.py [--model 0.6b] [--workloads nano,mid,single,ttft8k]
                                      [--kv-cache-dtype fp8] [--save MACHINE]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from common import machine, save, table

from octavo import LLM, SamplingParams

# hidden size, layers, attention heads, intermediate size
SHAPES = {"0.6b": (1024, 28, 16, 3072), "8b": (4096, 36, 32, 12288)}
# Measured on an H200 with vLLM 0.26: tokens per second; milliseconds for ttft8k.
RECORDED_VLLM = {
    ("0.6b", "nano"): 23330, ("0.6b", "shared"): 11123, ("0.6b", "mid"): 20928, ("0.6b", "single"): 600,
    ("0.6b", "ttft8k"): 33, ("8b", "mid"): 6102, ("8b", "shared"): 6884, ("8b", "single"): 189,
    ("8b", "ttft8k"): 212,
}  # fmt: skip

RECORDED_VLLM_FP8 = {("0.6b", "nano"): 24440, ("0.6b", "shared"): 10860}

Workload = tuple[list[list[int]], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--workloads", default="nano,mid,single,ttft8k,shared")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--save", metavar="MACHINE")
    arguments = parser.parse_args()
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    start = time.perf_counter()
    llm = load(arguments.model, arguments.kv_cache_dtype)
    number_bytes = llm.engine.plan.kv_dtype.itemsize
    ready_s = time.perf_counter() - start
    results, rows = {}, []
    for name in arguments.workloads.split(","):
        prompts, max_tokens = WORKLOADS[name]()
        bound = bound_s(arguments.model, prompts, max_tokens, bandwidth, flops, number_bytes)
        seconds = [run(llm, prompts, max_tokens) for _ in range(3)][1:]
        best = min(seconds)
        rate = best * 1000 if name == "ttft8k" else sum(max_tokens) / best
        unit = "ms" if name == "ttft8k" else "tokens/s"
        results[name] = {"seconds": seconds, "rate": rate, "bound_s": bound}
        recorded = recorded_vllm(arguments.model, name, arguments.kv_cache_dtype)
        rows.append([name, f"{rate:,.1f} {unit}", f"{bound / best:.0%}", f"{recorded} (recorded)"])
    print(table(["workload", f"Octavo, Qwen3-{arguments.model}", "of bound", "vLLM 0.26"], rows))
    report: dict[str, object] = {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "model": arguments.model,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "ready_s": ready_s,
        "copy_bytes_per_s": bandwidth,
        "matrix_flops": flops,
        "results": results,
    }
    if arguments.save:
        print("saved", save("gpu_serving", report, arguments.save))
    print(json.dumps(report))


def recorded_vllm(size: str, workload: str, kv_cache_dtype: str) -> int | str:
    """What was recorded of vLLM with the same cache, or nothing."""
    recorded = RECORDED_VLLM_FP8 if kv_cache_dtype == "fp8" else RECORDED_VLLM
    return recorded.get((size, workload), "")


def load(
    size: str,
    kv_cache_dtype: str = "auto",
    *,
    deterministic: bool = False,
    memory_fraction: float | None = None,
) -> LLM:
    """Build the model with random weights; options as of EngineConfig."""
    hidden, layers, heads, inner = SHAPES[size]
    config = dict(  # noqa: C408
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, num_key_value_heads=8,
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960,
        attention_bias=False, vocab_size=151936, eos_token_id=151645, torch_dtype="bfloat16",
        tie_word_embeddings=size == "0.6b", hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder),
        load_format="dummy",
        max_model_len=16384,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        memory_fraction=memory_fraction,
    )


def run(llm: LLM, prompts: list[list[int]], max_tokens: list[int]) -> float:
    """Seconds for all requests, from an empty prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0.6, max_tokens=m, ignore_eos=True, detokenize=False) for m in max_tokens
    ]
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens
    return seconds


def bound_s(
    size: str,
    prompts: list[list[int]],
    max_tokens: list[int],
    bandwidth: float,
    flops: float,
    number_bytes: int,
) -> float:
    """Weights and each KV token (shared ones once for all) read once a step, all operations at the peak.

    number_bytes: of a number of the KV cache.
    """
    _, layers, heads, _ = SHAPES[size]
    weights, head = num_weights(size)
    prefix = 0
    while len(prompts) > 1 and all(len(p) > prefix and p[prefix] == prompts[0][prefix] for p in prompts):
        prefix += 1
    num_prompt = prefix + sum(len(p) - prefix for p in prompts)
    attention = 4 * layers * heads * 128
    seconds = (2 * weights * num_prompt + attention * sum(len(p) ** 2 / 2 for p in prompts)) / flops
    for step in range(1, max(max_tokens)):
        live = [len(p) - prefix + step for p, m in zip(prompts, max_tokens, strict=True) if m > step]
        seconds += (
            step_bytes(size, [prefix, *live], number_bytes) / bandwidth
            + 2 * (weights + head) * len(live) / flops
        )
    return seconds


def num_weights(size: str) -> tuple[int, int]:
    """Numbers in the layers' products, and in the LM head."""
    hidden, layers, heads, inner = SHAPES[size]
    return layers * (hidden * (heads * 2 + 16) * 128 + 3 * hidden * inner), 151936 * hidden


def step_bytes(size: str, kv_lens: list[int], number_bytes: int = 2) -> int:
    """Bytes a decode step must read: all weights, and the keys and values of so many tokens."""
    return 2 * sum(num_weights(size)) + sum(kv_lens) * SHAPES[size][1] * 2 * 8 * 128 * number_bytes


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _event_s(lambda: target.copy_(source))


def matrix_flops() -> float:
    """bf16 operations per second on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _event_s(lambda: a @ b)


def _event_s(function: object, repeat: int = 10) -> float:
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[repeat // 2]


def _ids(rng: Random, num: int) -> list[int]:
    return [rng.randint(0, 10000) for _ in range(num)]


def nano() -> Workload:
    """256 requests, 100-1024 in, 100-1024 out."""
    rng = Random(0)
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def shared() -> Workload:
    """256 requests with a common prefix of 4096 tokens, 64-128 of their own in, 256 out."""
    rng = Random(1000)
    prefix = _ids(rng, 4096)
    return [prefix + _ids(rng, rng.randint(64, 128)) for _ in range(256)], [256] * 256


def mid() -> Workload:
    """128 requests, 256-1024 in, 128-256 out."""
    rng = Random(3000)
    return [_ids(rng, rng.randint(256, 1024)) for _ in range(128)], [
        rng.randint(128, 256) for _ in range(128)
    ]


def single() -> Workload:
    """512 in, 256 out."""
    return [_ids(Random(4000), 512)], [256]


def ttft8k() -> Workload:
    """8192 in, 1 out."""
    return [_ids(Random(5000), 8192)], [1]


WORKLOADS = {"nano": nano, "shared": shared, "mid": mid, "single": single, "ttft8k": ttft8k}

if __name__ == "__main__":
    main()
