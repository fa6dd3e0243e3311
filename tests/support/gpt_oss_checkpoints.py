"""Tiny gpt-oss checkpoints of random weights in the layout that is published: experts in MXFP4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Prompts of a few tokens are longer than the window; gate and down have blocks of their own numbers.
TINY: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def make_tensors(fields: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, float32 where gpt-oss has bfloat16."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.25) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    hidden, inner, number = (fields[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, kv_heads, dim = (fields[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors = {
        "model.embed_tokens.weight": random(fields["vocab_size"], hidden),
        "model.norm.weight": 0.5 + random(hidden),
        "lm_head.weight": random(fields["vocab_size"], hidden),
    }
    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 0.5 + random(hidden)
        sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        for name, size in sizes.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = random(size, hidden)
            tensors[f"{prefix}.self_attn.{name}.bias"] = random(size)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, heads * dim)
        tensors[f"{prefix}.self_attn.o_proj.bias"] = random(hidden)
        tensors[f"{prefix}.self_attn.sinks"] = random(heads, scale=2.0)
        tensors[f"{prefix}.mlp.router.weight"] = random(number, hidden)
        tensors[f"{prefix}.mlp.router.bias"] = random(number)
        shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        for name, (rows, columns) in shapes.items():
            stack = f"{prefix}.mlp.experts.{name}"
            tensors[f"{stack}_blocks"] = integers(0, 256, number, rows, columns // 32, 16)
            tensors[f"{stack}_scales"] = integers(121, 125, number, rows, columns // 32)
            tensors[f"{stack}_bias"] = random(number, rows)
    return tensors


def write_folder(folder: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a model folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
