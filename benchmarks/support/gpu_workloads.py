"""GPU serving workloads as token ids: deterministic, no tokenizer, the same for every engine.

Also holds the figures recorded for vLLM 0.26 on an H200. Needs neither torch nor a GPU.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

# Measured on an H200 with vLLM 0.26 in another run: tokens per second; milliseconds for ttft8k.
RECORDED_VLLM = {
    ("0.6b", "nano"): 23330, ("0.6b", "shared"): 11123, ("0.6b", "mid"): 20928, ("0.6b", "single"): 600,
    ("0.6b", "ttft8k"): 33, ("8b", "mid"): 6102, ("8b", "shared"): 6884, ("8b", "single"): 189,
    ("8b", "ttft8k"): 212,
}  # fmt: skip
RECORDED_VLLM_FP8 = {("0.6b", "nano"): 24440, ("0.6b", "shared"): 10860}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests submitted at once.

    Attributes:
        prompts: token ids of each request.
        max_tokens: output tokens of each of a request's completions.
        n: completions of each request.
        unit: "tokens/s" of output, or "ms" for the whole run.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    n: int = 1
    unit: str = "tokens/s"

    @property
    def num_output_tokens(self) -> int:
        return self.n * sum(self.max_tokens)

    def rate(self, seconds: float) -> float:
        """A run's figure in the workload's unit, given its seconds."""
        return seconds * 1000 if self.unit == "ms" else self.num_output_tokens / seconds


def run_figures(workload: Workload, seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds of an engine's runs in order, and the rates of the best one, the first one and their median."""
    return {
        "seconds": list(seconds),
        "rate": workload.rate(min(seconds)),
        "first_rate": workload.rate(seconds[0]),
        "median_rate": workload.rate(statistics.median(seconds)),
    }


def recorded_vllm(size: str, workload: str, kv_cache_dtype: str) -> int | None:
    """The figure recorded of vLLM with the same KV cache dtype, or None."""
    recorded = RECORDED_VLLM_FP8 if kv_cache_dtype == "fp8" else RECORDED_VLLM
    return recorded.get((size, workload))


def _ids(rng: Random, num: int) -> list[int]:
    return [rng.randint(0, 10000) for _ in range(num)]


def nano() -> Workload:
    """256 requests, 100-1024 in, 100-1024 out."""
    rng = Random(0)
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    return Workload(prompts, [rng.randint(100, 1024) for _ in range(256)])


def mid() -> Workload:
    """128 requests, 256-1024 in, 128-256 out."""
    rng = Random(3000)
    prompts = [_ids(rng, rng.randint(256, 1024)) for _ in range(128)]
    return Workload(prompts, [rng.randint(128, 256) for _ in range(128)])


def single() -> Workload:
    """512 in, 256 out."""
    return Workload([_ids(Random(4000), 512)], [256])


def ttft8k() -> Workload:
    """8192 in, 1 out."""
    return Workload([_ids(Random(5000), 8192)], [1], unit="ms")


def shared() -> Workload:
    """256 requests with a common prefix of 4096 tokens, 64-128 of their own in, 256 out."""
    rng = Random(1000)
    prefix = _ids(rng, 4096)
    return Workload([prefix + _ids(rng, rng.randint(64, 128)) for _ in range(256)], [256] * 256)


def samples64x8() -> Workload:
    """64 prompts of 512-1024 tokens, 8 completions of 128 tokens each."""
    rng = Random(6000)
    return Workload([_ids(rng, rng.randint(512, 1024)) for _ in range(64)], [128] * 64, n=8)


def rag() -> Workload:
    """A system prompt of 1024 tokens, 16 documents of 2048, 16 questions of 32-64 on each, 64 out."""
    rng = Random(7000)
    system = _ids(rng, 1024)
    documents = [system + _ids(rng, 2048) for _ in range(16)]
    prompts = [document + _ids(rng, rng.randint(32, 64)) for document in documents for _ in range(16)]
    return Workload(prompts, [64] * 256)


def fewshot() -> Workload:
    """512 inputs of 16-32 tokens behind the same 4096 tokens of examples, 1 out."""
    rng = Random(8000)
    examples = _ids(rng, 4096)
    return Workload([examples + _ids(rng, rng.randint(16, 32)) for _ in range(512)], [1] * 512)


def steady() -> Workload:
    """128 requests, 128 in, 1024 out: nearly all steps decode 128 sequences."""
    rng = Random(10000)
    return Workload([_ids(rng, 128) for _ in range(128)], [1024] * 128)


def thousands() -> Workload:
    """3,000 requests, 1000 in, 1000 out."""
    rng = Random(9000)
    return Workload([_ids(rng, 1000) for _ in range(3000)], [1000] * 3000)


def long() -> Workload:
    """64 requests, 32,768 in, 256 out."""
    rng = Random(11000)
    return Workload([_ids(rng, 32768) for _ in range(64)], [256] * 64)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "single": single,
    "ttft8k": ttft8k,
    "mid": mid,
    "nano": nano,
    "shared": shared,
    "samples64x8": samples64x8,
    "rag": rag,
    "fewshot": fewshot,
    "steady": steady,
    "thousands": thousands,
    "long": long,
}
# The others take up to minutes.
SHORT_WORKLOADS = [name for name in WORKLOADS if name not in ("steady", "thousands", "long")]
