"""The physical bound of a serving workload: bytes and operations that no engine can avoid. Needs no GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gpu_workloads import Workload

# Qwen3 and gpt-oss: hidden size, layers, attention heads, size of a feed-forward or an expert.
SHAPES = {
    "0.6b": (1024, 28, 16, 3072),
    "8b": (4096, 36, 32, 12288),
    "32b": (5120, 64, 64, 25600),
    "30b-a3b": (2048, 48, 32, 768),
    "gpt-oss-20b": (2880, 24, 64, 2880),
    "gpt-oss-120b": (2880, 36, 64, 2880),
}
KV_HEADS = {"0.6b": 8, "8b": 8, "32b": 8, "30b-a3b": 4, "gpt-oss-20b": 8, "gpt-oss-120b": 8}
# Experts of a layer, and of a token; others have one feed-forward.
EXPERTS = {"30b-a3b": (128, 8), "gpt-oss-20b": (32, 4), "gpt-oss-120b": (128, 4)}
# gpt-oss: keys that a token sees in every other layer; bytes of an expert's weight in MXFP4.
WINDOW = 128
MXFP4_BYTES = 0.5 + 1 / 32


def is_gpt_oss(size: str) -> bool:
    return size.startswith("gpt-oss")


def head_dim(size: str) -> int:
    return 64 if is_gpt_oss(size) else 128


def vocabulary(size: str) -> int:
    return 201088 if is_gpt_oss(size) else 151936


def label(size: str) -> str:
    """Name of a model for people."""
    return size if is_gpt_oss(size) else f"Qwen3-{size}"


def bound_s(
    size: str,
    workload: Workload,
    bandwidth: float,
    flops: float,
    number_bytes: int,
    weight_bytes: float = 2,
) -> float:
    """Seconds for a workload whose requests all run at once.

    Each decode step reads the weights once, of experts those that so many tokens touch on average, while its
    GEMMs compute: whichever takes longer. Then it reads the keys and values of every live token once, however
    many sequences share it. Each distinct prefix is prefilled once. Operations run at the peak.

    Args:
        size: of the model, a key of SHAPES.
        workload: the requests.
        bandwidth: bytes per second.
        flops: operations per second.
        number_bytes: bytes of one number in the KV cache.
        weight_bytes: bytes of one weight of the layers; the LM head's take 2, gpt-oss's experts' MXFP4_BYTES.
    """
    weights, head = num_weights(size)
    # Prompts that live longest come first, so that a token lives as long as the first prompt that has it.
    longest_first = np.argsort(workload.max_tokens)[::-1]
    prompts = [workload.prompts[index] for index in longest_first]
    lives = np.array(workload.max_tokens)[longest_first]
    begin, end = np.array(own_begins(prompts)), np.array([len(prompt) for prompt in prompts])
    products = 2 * weights * (end - begin).sum()
    seconds = (products + attention_operations(size, begin, end)) / flops
    for step in range(1, lives[0]):
        live = lives > step
        num_sequences = workload.n * int(live.sum())
        num_tokens = int((end - begin)[live].sum()) + num_sequences * step
        read = step_bytes(size, 0, number_bytes, weight_bytes, num_sequences)
        seconds += max(read / bandwidth, 2 * (weights + head) * num_sequences / flops)
        keys = step_bytes(size, num_tokens, number_bytes, weight_bytes, num_sequences) - read
        seconds += keys / bandwidth
    return float(seconds)


def run_bound_s(run: Mapping[str, Any], workload: Workload) -> float:
    """Seconds for a workload by what a report of gpu_serving.py says of its run: model, dtypes and rates."""
    # In 4 bits, a group of 128 has a scale and a minimum; products of many rows are in bfloat16.
    weight_bytes = {"fp8": 1, "int4": 17 / 32}.get(run.get("quantization", ""), 2)
    number_bytes = 1 if run.get("kv_cache_dtype") == "fp8" else 2
    flops = run["matrix_flops"] * (2 if weight_bytes == 1 else 1)
    return bound_s(run["model"], workload, run["copy_bytes_per_s"], flops, number_bytes, weight_bytes)


def own_begins(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt, the length of the longest prefix that an earlier prompt has too; by a trie."""
    children: dict[tuple[int, int], int] = {}
    begins = []
    for prompt in prompts:
        node, known = 0, 0
        for token in prompt:
            num_nodes = len(children)
            node = children.setdefault((node, token), num_nodes + 1)
            known += len(children) == num_nodes
        begins.append(known)
    return begins


def attention_operations(size: str, begin: np.ndarray, end: np.ndarray) -> float:
    """Operations of prompts' attention, of the positions from begin to end of each."""
    _, layers, heads, _ = SHAPES[size]
    keys = (end**2 - begin**2) / 2
    seen = layers * keys.sum()
    if is_gpt_oss(size):
        seen = layers / 2 * (keys.sum() + np.minimum(keys, (end - begin) * WINDOW).sum())
    return float(4 * heads * head_dim(size) * seen)


def num_weights(size: str, num_tokens: int = 1) -> tuple[int, int]:
    """Number of weights in all layers' GEMMs, and in the LM head; for experts see num_expert_weights."""
    hidden, layers, heads, _ = SHAPES[size]
    attention = hidden * (heads + KV_HEADS[size]) * 2 * head_dim(size)
    router = hidden * EXPERTS[size][0] if size in EXPERTS else 0
    dense = layers * (attention + router)
    return dense + num_expert_weights(size, num_tokens), vocabulary(size) * hidden


def num_expert_weights(size: str, num_tokens: int = 1) -> int:
    """Number of weights of all layers' feed-forwards.

    Of experts those that tokens touch on average, if each chooses at random; for one token, those it uses.
    """
    hidden, layers, _, inner = SHAPES[size]
    number, chosen = EXPERTS.get(size, (1, 1))
    touched = number * (1 - (1 - chosen / number) ** num_tokens)
    return layers * round(touched * 3 * hidden * inner)


def step_bytes(
    size: str, num_kv_tokens: int, number_bytes: int = 2, weight_bytes: float = 2, num_tokens: int = 1
) -> float:
    """Bytes that a decode step of `num_tokens` must read: weights, and keys and values of `num_kv_tokens`."""
    weights, head = num_weights(size, num_tokens)
    kv_tokens, layers = num_kv_tokens, SHAPES[size][1]
    total = weight_bytes * weights + 2 * head
    if is_gpt_oss(size):
        total -= (weight_bytes - MXFP4_BYTES) * num_expert_weights(size, num_tokens)
        kv_tokens = (num_kv_tokens + min(num_kv_tokens, WINDOW * num_tokens)) / 2
    return total + kv_tokens * layers * 2 * KV_HEADS[size] * head_dim(size) * number_bytes


def step_operations(size: str, num_decoding: int, context: int, prompt: int) -> float:
    """Operations of a step that reads a prompt while sequences of `context` tokens decode."""
    _, layers, heads, _ = SHAPES[size]
    weights, head = num_weights(size)
    products = 2 * weights * (prompt + num_decoding) + 2 * head * (num_decoding + 1)
    return products + 4 * layers * heads * head_dim(size) * (prompt**2 / 2 + num_decoding * context)
