"""Serving workloads on one NVIDIA GPU: random weights with the true shapes, temperature 0.6, no detokenising.

Prints tokens per second (or time to first token) beside the physical bound (gpu_bound.py: bytes at the
measured copy bandwidth plus operations at the measured matrix rate), beside Hugging Face transformers in the
same run, and beside figures of vLLM 0.26 on an H200, recorded in another run. The last line is JSON.

    python benchmarks/gpu_serving.py [--model 0.6b] [--workloads nano,mid,single,ttft8k] [--sharing both]
                                      [--peer none] [--peer-limit 60] [--startup] [--kv-cache-dtype fp8]
                                      [--save MACHINE]
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import machine, save, table
from gpu_bound import SHAPES, bound_s
from gpu_peer import LABEL, measure_peer
from gpu_startup import measure_startup
from gpu_workloads import WORKLOADS, Workload, recorded_vllm

from octavo import LLM, SamplingParams

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--sharing", choices=["on", "off", "both"], default="on", help="share_prefixes")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument(
        "--peer", choices=["hf", "none"], default="hf" if find_spec("transformers") else "none"
    )
    parser.add_argument("--peer-limit", type=float, default=60, help="seconds the peer gets for a workload")
    parser.add_argument("--startup", action="store_true", help="measure the start in a fresh process too")
    parser.add_argument("--save", metavar="MACHINE")
    arguments = parser.parse_args()
    report = measure(arguments)
    print_report(report)
    if arguments.save:
        suffix = "" if arguments.kv_cache_dtype == "auto" else f"-{arguments.kv_cache_dtype}"
        print("saved", save(f"gpu_serving-{arguments.model}{suffix}", report, arguments.save))
    print(json.dumps(report))


def measure(arguments: argparse.Namespace) -> Figures:
    """Measure the start, the machine, the peer and then the engine, each with the GPU to itself."""
    size, kv_cache_dtype = arguments.model, arguments.kv_cache_dtype
    workloads = {name: WORKLOADS[name]() for name in arguments.workloads.split(",")}
    startup = measure_startup(size, kv_cache_dtype) if arguments.startup else None
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    peer = {}
    if arguments.peer == "hf":
        peer = measure_peer(model_config(size), workloads, limit_s=arguments.peer_limit)
    free_memory()
    engines = {}
    for share_prefixes in {"on": [True], "off": [False], "both": [False, True]}[arguments.sharing]:
        engines[share_prefixes] = measure_engine(size, kv_cache_dtype, share_prefixes, workloads)
        free_memory()
    number_bytes = 1 if kv_cache_dtype == "fp8" else 2
    results = {}
    for name, workload in workloads.items():
        bound = bound_s(size, workload, bandwidth, flops, number_bytes)
        results[name] = {
            "unit": workload.unit,
            **engines[arguments.sharing != "off"]["results"][name],
            "bound_s": bound,
            "bound_rate": workload.rate(bound),
            "unshared": engines[False]["results"][name] if arguments.sharing == "both" else None,
            "hf": peer.get(name),
            "vllm_recorded": recorded_vllm(size, name, kv_cache_dtype),
        }
    return {
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "model": size,
        "kv_cache_dtype": kv_cache_dtype,
        "sharing": arguments.sharing,
        "peer": LABEL if peer else None,
        "startup": startup,
        "ready_s": [engine["ready_s"] for engine in engines.values()],
        "num_kv_tokens": [engine["num_kv_tokens"] for engine in engines.values()],
        "copy_bytes_per_s": bandwidth,
        "matrix_flops": flops,
        "results": results,
    }


def measure_engine(
    size: str, kv_cache_dtype: str, share_prefixes: bool, workloads: dict[str, Workload]
) -> Figures:
    """Load one engine and run every workload: once to warm up, twice, or once without sharing, to measure."""
    start = time.perf_counter()
    llm = load(size, kv_cache_dtype, share_prefixes)
    ready_s = time.perf_counter() - start
    results = {}
    for name, workload in workloads.items():
        seconds = [run(llm, workload) for _ in range(3 if share_prefixes else 2)][1:]
        results[name] = {"seconds": seconds, "rate": workload.rate(min(seconds))}
        label = "" if share_prefixes else " without sharing"
        print(f"{name}{label}: {results[name]['rate']:,.1f} {workload.unit}", file=sys.stderr, flush=True)
    return {"ready_s": ready_s, "num_kv_tokens": llm.engine.plan.num_kv_tokens, "results": results}


def print_report(report: Figures) -> None:
    """Print the table, its labels and the start."""
    both = report["sharing"] == "both"
    header = [
        "workload",
        f"Octavo, Qwen3-{report['model']}",
        "of bound",
        *(["without sharing"] if both else []),
        report["peer"] or "no peer in this run",
        "vLLM 0.26 (recorded)",
    ]
    rows = []
    for name, result in report["results"].items():
        unshared = [f"{result['unshared']['rate']:,.1f}"] if both else []
        rows.append(
            [
                name,
                f"{result['rate']:,.1f} {result['unit']}",
                f"{result['bound_s'] / min(result['seconds']):.0%}",
                *unshared,
                _describe_peer(result["hf"]),
                "" if result["vllm_recorded"] is None else f"{result['vllm_recorded']:,}",
            ]
        )
    print(table(header, rows))
    print(f"share_prefixes {report['sharing']}; ready s {report['ready_s']}; start {report['startup']}")


def _describe_peer(figures: Figures | None) -> str:
    if figures is None:
        return ""
    rate = f"{figures['rate']:,.1f}" if "rate" in figures else ""
    return f"{rate} ({figures['note']})" if figures["note"] else rate


def model_config(size: str) -> Figures:
    """Fields of config.json."""
    hidden, layers, heads, inner = SHAPES[size]
    return dict(  # noqa: C408
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128, num_key_value_heads=8,
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960,
        attention_bias=False, vocab_size=151936, eos_token_id=151645, torch_dtype="bfloat16",
        tie_word_embeddings=size == "0.6b", hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
    )  # fmt: skip


def load(
    size: str,
    kv_cache_dtype: str = "auto",
    share_prefixes: bool = True,
    *,
    deterministic: bool = False,
    memory_fraction: float | None = None,
) -> LLM:
    """Build the model with random weights; options as of EngineConfig."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(model_config(size)))
    return LLM(
        str(folder),
        load_format="dummy",
        max_model_len=16384,
        kv_cache_dtype=kv_cache_dtype,
        share_prefixes=share_prefixes,
        deterministic=deterministic,
        memory_fraction=memory_fraction,
    )


def run(llm: LLM, workload: Workload) -> float:
    """Seconds for all requests, from an empty prefix cache."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(n=workload.n, temperature=0.6, max_tokens=num, ignore_eos=True, detokenize=False)
        for num in workload.max_tokens
    ]
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - start
    for output, num in zip(outputs, workload.max_tokens, strict=True):
        assert [len(completion.token_ids) for completion in output.outputs] == [num] * workload.n
    return seconds


def free_memory() -> None:
    """Give back to the device what the model before held: the next cache takes a share of what is free."""
    gc.collect()
    torch.cuda.empty_cache()


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


if __name__ == "__main__":
    main()
