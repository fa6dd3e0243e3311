"""Tiny random checkpoints whose layers keep windows of keys, for engines and for transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from decoder_harness import random_weights
from gpt_oss_checkpoints import make_tensors, write_folder
from safetensors.torch import save_file
from torch import Tensor

from octavo.models import ModelConfig

WINDOW = 6
VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FIVE_TO_ONE = ["sliding_attention"] * 5 + ["full_attention"]
TWO_TO_ONE = ["sliding_attention", "sliding_attention", "full_attention"]
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "layer_types": TWO_TO_ONE * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 20.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    # Experts are made of blocks of 32 columns.
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
}
# What each has of its own, beside SMALL.
OWN: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": FIVE_TO_ONE,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    # Heads of two sizes, each layer with an input of its own, ...
    "gemma4-inputs": GEMMA4 | {"hidden_size_per_layer_input": 8},
    # ... keys as values, ...
    "gemma4-keys-as-values": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # ... layers that read the cache of another.
    "gemma4-shared": GEMMA4
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "layer_types": THREE_TO_ONE,
        # Olmo has no heads of a size of their own.
        "hidden_size": 64,
    },
    "gpt-oss": GPT_OSS,
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 3,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "sliding_window": None,
    },
}
WINDOWED = [name for name in OWN if name != "llama"]


def fields_of(name: str, **changed: Any) -> dict[str, Any]:
    """Return what a model's config.json says."""
    return SMALL | OWN[name] | changed


def write_model(folder: Path, name: str, **changed: Any) -> Path:
    """Write a model folder with float32 weights that transformers can load too; return the folder.

    Args:
        folder: where; it is made.
        name: of a model of OWN.
        changed: other values for config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = fields_of(name, **changed)
    if name == "gpt-oss":
        write_folder(folder, fields, _dequantised(make_tensors(fields)))
        return folder
    tensors = random_weights(ModelConfig.from_hf(fields)).tensors
    for tensor in tensors.values():
        if tensor.dim() == 1:
            # A norm of weights near 0 would hide what comes before it.
            tensor += 0.5
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put stacks [E, K, N] of floats in the place of packed experts, as transformers saves them."""
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        number, rows, groups, _ = tensors.pop(name).shape
        stack = name.removesuffix("_blocks")
        del tensors[f"{stack}_scales"]
        tensors[stack] = 0.25 * torch.randn(number, 32 * groups, rows, generator=generator)
    return tensors
