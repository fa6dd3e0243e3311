"""A model of random weights on an NVIDIA GPU, and one timed run of a workload on it."""

import gc
import time
from typing import Any

import torch

from octavo import LLM, SamplingParams

from .gpu_workloads import Workload
from .model_folder import model_folder


def load(
    size: str,
    kv_cache_dtype: str = "auto",
    share_prefixes: bool = True,
    *,
    deterministic: bool = False,
    memory_fraction: float | None = None,
    max_model_len: int = 16384,
    **options: Any,
) -> LLM:
    """Build the model with random weights; options are those of EngineConfig."""
    return LLM(
        model_folder(size),
        load_format="dummy",
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        share_prefixes=share_prefixes,
        deterministic=deterministic,
        memory_fraction=memory_fraction,
        **options,
    )


def run(llm: LLM, workload: Workload) -> float:
    """Seconds that all requests take, starting with an empty prefix cache."""
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
    """Free the last model's memory: the next KV cache takes a share of what is free."""
    gc.collect()
    torch.cuda.empty_cache()
