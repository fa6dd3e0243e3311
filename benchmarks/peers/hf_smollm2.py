"""SmolLM2 as a Hugging Face model with the same weights as Octavo's: the peer of CPU benchmarks."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.models import open_weights, read_config, resolve_model


def load_smollm2(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Build the Hugging Face model and copy the dequantised weights into it."""
    source = resolve_model("smollm2")
    config: dict[str, Any] = {
        key: value for key, value in read_config(source).items() if key != "architectures"
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    weights = open_weights(source)
    state = {name: weights.read(name, dtype=dtype) for name in weights.names()}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    rotary = model.model.rotary_emb
    rotary.__init__(model.config)
    weights.close()
    return model.eval()
