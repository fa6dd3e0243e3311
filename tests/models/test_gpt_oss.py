"""gpt-oss against transformers, from dequantised stacks and from MXFP4 as it is published."""

from typing import Any

import pytest
import torch
from decoder_harness import (
    PagedSequences,
    greedy,
    hugging_face_greedy,
    hugging_face_logits,
    hugging_face_model,
    hugging_face_weights,
    make_decoder,
    quiet_transformers,
    run_chunked,
)
from test_decoder_families import config_json, make_prompts

from octavo.models import ModelConfig

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 4,
    "sliding_window": 8,
}


def make_model() -> Any:
    with quiet_transformers():
        return hugging_face_model(transformers.GptOssConfig(**SMALL))


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_logits_and_greedy_tokens_equal_transformers(impl: str) -> None:
    model = make_model()
    config = ModelConfig.from_hf(config_json(model))
    decoder = make_decoder(config, hugging_face_weights(model), attention_impl=impl)
    prompts = make_prompts(config.vocab_size)
    sequences = PagedSequences(decoder, block_size=3)
    logits = run_chunked(sequences, prompts)
    for name, tokens in prompts.items():
        torch.testing.assert_close(logits[name], hugging_face_logits(model, tokens), atol=2e-4, rtol=1e-4)
    continued = greedy(sequences, logits, 6)
    for name, tokens in prompts.items():
        assert continued[name] == hugging_face_greedy(model, tokens, 6)
