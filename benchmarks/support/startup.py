"""Seconds that an engine on a GPU takes to start in a fresh process whose kernels are compiled already."""

import json
import subprocess
import sys
import time
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[1]


def measure_startup(size: str, kv_cache_dtype: str) -> dict[str, float]:
    """Start an engine in two processes, one after the other; the first one fills the cache of kernels.

    Returns:
        Of the second process: ready_s, until LLM(...) returns; first_token_s, from there until one token
        after a prompt of 16; process_s, from the start of the process to that token, imports included. Of
        the first process: earlier_ready_s, its ready_s.

    Raises:
        SystemExit: a process failed.
    """
    earlier, later = (_in_a_process(size, kv_cache_dtype) for _ in range(2))
    return {**later, "earlier_ready_s": earlier["ready_s"]}


def _in_a_process(size: str, kv_cache_dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "support.startup", size, kv_cache_dtype]
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True, cwd=_BENCHMARKS)
    if done.returncode != 0:
        raise SystemExit(f"the engine did not start:\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "process_s": figures.pop("answered_at") - begun}


def start_here(size: str, kv_cache_dtype: str) -> dict[str, float]:
    """Load the model and generate a token, in this process."""
    from octavo import SamplingParams

    from .gpu_model import load

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
    print(json.dumps(start_here(sys.argv[1], sys.argv[2])))
