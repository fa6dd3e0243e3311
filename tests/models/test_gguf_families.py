"""GGUF files of families whose norms and factors differ from Llama's, against transformers."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_builder as build
import pytest
import torch
from decoder_harness import (
    PagedSequences,
    hugging_face_logits,
    hugging_face_model,
    hugging_face_weights,
    make_decoder,
    quiet_transformers,
    run_chunked,
)
from gguf_cases import converted

from octavo.models import ModelConfig, parameter_shapes
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.25,
    "logits_scaling": 6.0,
}
THREE_OF_FOUR = [True, True, True, False, True]
WINDOW = {"attention.sliding_window": 4, "attention.sliding_window_pattern": THREE_OF_FOUR}
# Case -> class and fields in transformers, and what the converter writes beside sizes.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}, {}),
    "olmo2-of-olmo3": ("Olmo3Config", {"sliding_window": 4}, WINDOW | {"rope.freq_base": 500000.0}),
    "exaone4": ("Exaone4Config", {"sliding_window": 4}, WINDOW),
    "granite": (
        "GraniteConfig",
        FACTORS,
        {
            "attention.scale": 0.2,
            "embedding_scale": 12.0,
            "residual_scale": 0.25,
            "logit_scale": 6.0,
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}, {}),
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str, architecture: str) -> str:
    """The converter's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, rest = name.partition("model.layers.")
    layer, _, rest = rest.partition(".")
    stem, _, kind = rest.rpartition(".")
    own = NAMES[stem]
    if architecture == "granite" and own == "post_attention_norm":
        own = "ffn_norm"
    return f"blk.{layer}.{own}.{kind}"


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    class_name, fields, keys = CASES[case]
    with quiet_transformers():
        model = hugging_face_model(getattr(transformers, class_name)(**SIZES | fields))
    architecture = case.partition("-")[0]
    tensors = []
    for name, value in hugging_face_weights(model).tensors.items():
        own = stored_name(name, architecture)
        if architecture == "granite" and own.endswith(("attn_q.weight", "attn_k.weight")):
            value = converted(value, 4 if "attn_q" in own else 2)
        tensors.append(build.Tensor.of(own, value.numpy()))
    metadata = {
        "block_count": 5,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **keys,
    }
    pairs = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in metadata.items()}
    file = GGUFFile.open(build.write(tmp_path / "m.gguf", pairs, tensors))
    config = ModelConfig.from_hf(gguf_to_hf_config(file))
    weights: Any
    with closing(GGUFWeights(file)) as weights:
        assert {name: weights.shape(name) for name in weights.names()} == parameter_shapes(config)
        tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
        logits = run_chunked(PagedSequences(make_decoder(config, weights), block_size=4), {"a": tokens})["a"]
    torch.testing.assert_close(logits, hugging_face_logits(model, tokens), atol=2e-5, rtol=2e-5)
