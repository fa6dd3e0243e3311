"""The physical bound of a serving workload: bytes and operations that no engine can avoid. Needs no GPU."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .gpu_workloads import Workload

# Qwen3, gpt-oss and Gemma 4: hidden size, layers, attention heads, size of a feed-forward or an expert.
SHAPES = {
    "0.6b": (1024, 28, 16, 3072),
    "8b": (4096, 36, 32, 12288),
    "32b": (5120, 64, 64, 25600),
    "30b-a3b": (2048, 48, 32, 768),
    "gpt-oss-20b": (2880, 24, 64, 2880),
    "gpt-oss-120b": (2880, 36, 64, 2880),
    "gemma4-31b": (5376, 60, 32, 21504),
    "gemma4-26b-a4b": (2816, 30, 16, 704),
}
KV_HEADS = {"0.6b": 8, "8b": 8, "32b": 8, "30b-a3b": 4, "gpt-oss-20b": 8, "gpt-oss-120b": 8}
KV_HEADS |= {"gemma4-31b": 16, "gemma4-26b-a4b": 8}
# Experts of a layer, and of a token; others have one feed-forward.
EXPERTS = {"30b-a3b": (128, 8), "gpt-oss-20b": (32, 4), "gpt-oss-120b": (128, 4), "gemma4-26b-a4b": (128, 8)}
# The feed-forward beside experts.
BESIDE = {"gemma4-26b-a4b": 2112}
# Gemma 4, every sixth layer: kv heads of 512, whose keys are values.
GLOBAL_KV_HEADS = {"gemma4-31b": 4, "gemma4-26b-a4b": 2}
# Keys that a token sees in the other layers, and in every other one of gpt-oss; bytes of an expert's weight in MXFP4.
GEMMA_WINDOW, WINDOW = 1024, 128
MXFP4_BYTES = 0.5 + 1 / 32


class LayerKind(NamedTuple):
    """Layers with the same attention.

    Attributes:
        number: of layers.
        kv_heads: of each.
        dim: of a head.
        window: keys that a token sees; None: all.
        projections: of keys and values: 1 where keys are values.
    """

    number: int
    kv_heads: int
    dim: int
    window: int | None = None
    projections: int = 2


def layer_kinds(size: str) -> list[LayerKind]:
    """Return the layers of a model, a key of SHAPES."""
    layers, kv_heads = SHAPES[size][1], KV_HEADS[size]
    if is_gpt_oss(size):
        return [LayerKind(layers // 2, kv_heads, 64, WINDOW), LayerKind(layers // 2, kv_heads, 64)]
    if is_gemma(size):
        return [
            LayerKind(layers * 5 // 6, kv_heads, 256, GEMMA_WINDOW),
            LayerKind(layers // 6, GLOBAL_KV_HEADS[size], 512, projections=1),
        ]
    return [LayerKind(layers, kv_heads, 128)]


def is_gpt_oss(size: str) -> bool:
    return size.startswith("gpt-oss")


def is_gemma(size: str) -> bool:
    return size.startswith("gemma")


def head_dim(size: str) -> int:
    """Return the dimensions of a head of the first layer."""
    return layer_kinds(size)[0].dim


def vocabulary(size: str) -> int:
    return 201088 if is_gpt_oss(size) else 262144 if is_gemma(size) else 151936


def label(size: str) -> str:
    """Name of a model for people."""
    return size if is_gpt_oss(size) or is_gemma(size) else f"Qwen3-{size}"


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
    heads, keys = SHAPES[size][2], (end**2 - begin**2) / 2
    total = 0.0
    for kind in layer_kinds(size):
        seen = keys if kind.window is None else np.minimum(keys, (end - begin) * kind.window)
        total += kind.number * 4 * heads * kind.dim * seen.sum()
    return float(total)


def num_weights(size: str, num_tokens: int = 1) -> tuple[int, int]:
    """Number of weights in all layers' GEMMs, and in the LM head; for experts see num_expert_weights."""
    hidden, layers, heads, _ = SHAPES[size]
    attention = sum(
        kind.number * hidden * (2 * heads + kind.projections * kind.kv_heads) * kind.dim
        for kind in layer_kinds(size)
    )
    router = hidden * EXPERTS[size][0] if size in EXPERTS else 0
    dense = attention + layers * (router + 3 * hidden * BESIDE.get(size, 0))
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
    total = weight_bytes * weights + 2 * head
    if is_gpt_oss(size):
        total -= (weight_bytes - MXFP4_BYTES) * num_expert_weights(size, num_tokens)
    for kind in layer_kinds(size):
        seen = num_kv_tokens if kind.window is None else min(num_kv_tokens, kind.window * num_tokens)
        total += seen * kind.number * 2 * kind.kv_heads * kind.dim * number_bytes
    return total


def step_operations(size: str, num_decoding: int, context: int, prompt: int) -> float:
    """Operations of a step that reads a prompt while sequences of `context` tokens decode."""
    heads = SHAPES[size][2]
    weights, head = num_weights(size)
    total = 2.0 * weights * (prompt + num_decoding) + 2 * head * (num_decoding + 1)
    for kind in layer_kinds(size):
        window = kind.window or max(prompt, context)
        seen = min(prompt**2 / 2, prompt * window) + num_decoding * min(context, window)
        total += 4 * kind.number * heads * kind.dim * seen
    return total
