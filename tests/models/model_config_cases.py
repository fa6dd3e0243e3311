"""config.json of a Llama, and of other architectures made from it."""

from typing import Any

from octavo.models import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    base = {name: value for name, value in LLAMA.items() if name not in ("model_type", "rope_theta")}
    return base | {"architectures": [architecture], "num_hidden_layers": 6, "head_dim": 64} | fields


def read(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(config)
