"""Serving workloads on one NVIDIA GPU: random weights in the shapes of Qwen3, gpt-oss and Gemma 4, temperature 0.6.

Prints tokens per second, or time to first token, beside the physical bound (support/gpu_bound.py: of GEMMs
the longer of bytes at the measured copy rate and operations at the measured matrix rate), beside Hugging Face
transformers, which runs first in the same process, or vLLM, which runs before in a process of its own.
Without --peer vllm the figures of vLLM are those recorded on another H200. Every engine runs a workload
--runs times; the table quotes the best run, with the first one in brackets. The last line is JSON.

    python benchmarks/gpu_serving.py [--model 0.6b] [--workloads nano,mid,single,ttft8k] [--sharing both]
                                      [--peer vllm] [--peer-limit 60] [--startup] [--kv-cache-dtype fp8]
                                      [--quantization fp8] [--generation 8] [--runs 3] [--save MACHINE]

--quantization int4 takes random integers in groups of 128, --generation 8 the kernels of an older GPU.
"""

import argparse
import os
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

from peers.hf_serving import LABEL, measure_peer
from peers.vllm_serving import measure_in_child
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES, label, run_bound_s
from support.gpu_model import free_memory, load, run
from support.gpu_timing import copy_bandwidth, matrix_flops
from support.gpu_workloads import SHORT_WORKLOADS, WORKLOADS, Workload, recorded_vllm, run_figures
from support.model_folder import model_config
from support.random_int4 import GPTQ, random_int4
from support.startup import measure_startup

from octavo.kernels.device import GENERATION_VARIABLE

Figures = dict[str, Any]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--workloads", default=",".join(SHORT_WORKLOADS))
    parser.add_argument("--sharing", choices=["on", "off", "both"], default="on", help="share_prefixes")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--quantization", choices=["auto", "fp8", "int4"], default="auto", help="of weights")
    parser.add_argument(
        "--peer", choices=["hf", "vllm", "none"], default="hf" if find_spec("transformers") else "none"
    )
    parser.add_argument(
        "--peer-limit", type=float, default=60, help="most seconds of Hugging Face for a workload"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of a workload on an engine")
    parser.add_argument("--startup", action="store_true", help="measure start-up in fresh processes too")
    parser.add_argument("--generation", help="take the kernels of an older GPU: 8")
    arguments = parser.parse_args()
    if arguments.generation:
        os.environ[GENERATION_VARIABLE] = arguments.generation
    report = measure(arguments)
    print_report(report)
    suffix = "" if arguments.kv_cache_dtype == "auto" else f"-{arguments.kv_cache_dtype}"
    if arguments.quantization != "auto":
        suffix += f"-weights-{arguments.quantization}"
    if arguments.generation:
        suffix += f"-generation-{arguments.generation}"
    publish(f"gpu_serving-{arguments.model}{suffix}", report, arguments)


def measure(arguments: argparse.Namespace) -> Figures:
    """Measure start-up, the GPU's rates, the peer and the engine, one after the other, alone on the GPU."""
    size, kv_cache_dtype = arguments.model, arguments.kv_cache_dtype
    workloads = {name: WORKLOADS[name]() for name in arguments.workloads.split(",")}
    startup = measure_startup(size, kv_cache_dtype) if arguments.startup else None
    vllm = None
    if arguments.peer == "vllm":
        settings = {"model": size, "kv_cache_dtype": kv_cache_dtype, "runs": arguments.runs}
        if arguments.generation:
            settings["attention_backend"] = "TRITON_ATTN"
        if arguments.quantization != "auto":
            weights = {"fp8": {"quantization": "fp8"}, "int4": {"fields": {"quantization_config": GPTQ}}}
            settings |= weights[arguments.quantization]
        vllm = measure_in_child("offline", {**settings, "workloads": list(workloads)}, limit_s=420)
    measured = {
        "model": size,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": arguments.quantization,
        "generation": arguments.generation,
        "copy_bytes_per_s": copy_bandwidth(),
        "matrix_flops": matrix_flops(),
    }
    peer = {}
    if arguments.peer == "hf":
        peer = measure_peer(model_config(size), workloads, limit_s=arguments.peer_limit)
    free_memory()
    engines = {}
    for share_prefixes in {"on": [True], "off": [False], "both": [False, True]}[arguments.sharing]:
        engines[share_prefixes] = measure_engine(arguments, share_prefixes, workloads)
        free_memory()
    results = {}
    for name, workload in workloads.items():
        bound = run_bound_s(measured, workload)
        results[name] = {
            "unit": workload.unit,
            **engines[arguments.sharing != "off"]["results"][name],
            "bound_s": bound,
            "bound_rate": workload.rate(bound),
            "unshared": engines[False]["results"][name] if arguments.sharing == "both" else None,
            "hf": peer.get(name),
            "vllm": None if vllm is None else vllm["results"][name],
            "vllm_recorded": recorded_vllm(size, name, kv_cache_dtype),
        }
    return {
        **measured,
        "sharing": arguments.sharing,
        "peer": LABEL if peer else None,
        "vllm_version": None if vllm is None else vllm["version"],
        "vllm_ready_s": None if vllm is None else vllm["ready_s"],
        "runs": arguments.runs,
        "startup": startup,
        "ready_s": [engine["ready_s"] for engine in engines.values()],
        "num_kv_tokens": [engine["num_kv_tokens"] for engine in engines.values()],
        "results": results,
    }


def measure_engine(
    arguments: argparse.Namespace, share_prefixes: bool, workloads: dict[str, Workload]
) -> Figures:
    """Load one engine and run each workload several times."""
    start = time.perf_counter()
    is_int4 = arguments.quantization == "int4"
    quantization = "auto" if is_int4 else arguments.quantization
    with random_int4() if is_int4 else nullcontext():
        longest = max(
            len(prompt) + num
            for workload in workloads.values()
            for prompt, num in zip(workload.prompts, workload.max_tokens, strict=True)
        )
        options = {"quantization": quantization, "max_model_len": max(16384, longest)}
        llm = load(arguments.model, arguments.kv_cache_dtype, share_prefixes, **options)
    ready_s = time.perf_counter() - start
    results = {}
    for name, workload in workloads.items():
        results[name] = run_figures(workload, [run(llm, workload) for _ in range(arguments.runs)])
        label = "" if share_prefixes else " without sharing"
        print(f"{name}{label}: {results[name]['rate']:,.1f} {workload.unit}", file=sys.stderr, flush=True)
    return {"ready_s": ready_s, "num_kv_tokens": llm.engine.plan.num_kv_tokens, "results": results}


def print_report(report: Figures) -> None:
    """Print the table, then sharing and start-up times."""
    both, vllm = report["sharing"] == "both", report["vllm_version"]
    header = [
        "workload",
        f"Octavo, {label(report['model'])}: best (first)",
        "of bound",
        *(["without sharing"] if both else []),
        *([report["peer"]] if report["peer"] else []),
        f"vLLM {vllm}, same run: best (first)" if vllm else "vLLM 0.26 (recorded)",
    ]
    rows = []
    for name, result in report["results"].items():
        unshared = [f"{result['unshared']['rate']:,.1f}"] if both else []
        rows.append(
            [
                name,
                f"{_best_and_first(result)} {result['unit']}",
                f"{result['bound_s'] / min(result['seconds']):.0%}",
                *unshared,
                *([_describe_peer(result["hf"])] if report["peer"] else []),
                _describe_vllm(result),
            ]
        )
    print(table(header, rows))
    print(
        f"best of {report['runs']} runs, the first in brackets; "
        f"share_prefixes {report['sharing']}; ready after {report['ready_s']} s; start-up {report['startup']}"
    )


def _best_and_first(figures: Figures) -> str:
    return f"{figures['rate']:,.1f} ({figures['first_rate']:,.1f})"


def _describe_vllm(result: Figures) -> str:
    """What this run measured; without that, what was recorded."""
    if result["vllm"] is not None:
        return _best_and_first(result["vllm"])
    return "" if result["vllm_recorded"] is None else f"{result['vllm_recorded']:,}"


def _describe_peer(figures: Figures | None) -> str:
    if figures is None:
        return ""
    rate = f"{figures['rate']:,.1f}" if "rate" in figures else ""
    return f"{rate} ({figures['note']})" if figures["note"] else rate


if __name__ == "__main__":
    main()
