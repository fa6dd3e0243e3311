"""Seconds an engine on a GPU takes to start: in a fresh process, kernels compiled by an earlier one.

    python benchmarks/gpu_startup.py [--model 0.6b] [--kv-cache-dtype fp8]

Two processes run one after the other, and the second one counts: the first fills the cache of kernels. The
last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time

from gpu_bound import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = start_here if arguments.worker else measure_startup
    print(json.dumps(work(arguments.model, arguments.kv_cache_dtype)))


def measure_startup(size: str, kv_cache_dtype: str) -> dict[str, float]:
    """Start an engine in two processes; returns the second one's figures and the first one's ready_s.

    Returns:
        ready_s: LLM(...) has returned. first_token_s: since then, for 16 tokens in and 1 out. process_s:
        from the start of the process, with its imports, to that token. earlier_ready_s: of the process
        before, which compiled what was not compiled yet.
    """
    earlier, later = (_in_a_process(size, kv_cache_dtype) for _ in range(2))
    return {**later, "earlier_ready_s": earlier["ready_s"]}


def _in_a_process(size: str, kv_cache_dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", "--model", size, "--kv-cache-dtype", kv_cache_dtype]
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the engine did not start:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "process_s": figures.pop("answered_at") - begun}


def start_here(size: str, kv_cache_dtype: str) -> dict[str, float]:
    """Load the model and generate a token, in this process."""
    from gpu_serving import load

    from octavo import SamplingParams

    start = time.perf_counter()
    llm = load(size, kv_cache_dtype)
    ready = time.perf_counter()
    llm.generate(list(range(16)), SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False))
    return {
        "ready_s": ready - start,
        "first_token_s": time.perf_counter() - ready,
        "answered_at": time.time(),
    }


if __name__ == "__main__":
    main()
