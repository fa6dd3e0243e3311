"""Values of GGUF tensors, and how the converter reorders heads."""

import numpy as np
import torch

INTERLEAVED = ("llama", "mistral3", "smollm3")
ARCHITECTURES = (*INTERLEAVED, "qwen2", "qwen3", "gemma2", "gemma3")


def values(tensors, name):
    tensor = next(tensor for tensor in tensors if tensor.name == name)
    return torch.from_numpy(
        np.frombuffer(tensor.data, "<f4").reshape(tuple(reversed(tensor.dimensions))).copy()
    )


def converted(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter does to q and k of llama models, row by row."""
    out = torch.empty_like(weights)
    head_dim = len(weights) // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weights[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weights[head * head_dim + head_dim // 2 + i]
    return out
