"""GGUF files of families whose norms and factors differ from Llama's, against transformers."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
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
from octavo.models.formats.gguf.architectures import ARCHITECTURES
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config
from octavo.models.parameters import draft_names

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
GRANITE_KEYS = {
    "attention.scale": 0.2,
    "embedding_scale": 12.0,
    "residual_scale": 0.25,
    "logit_scale": 6.0,
}
SMALL_EXPERTS = {"expert_used_count": 2, "expert_feed_forward_length": 32}
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
# Case -> class and fields in transformers, and what the converter writes beside sizes.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}, {}),
    "olmo2-of-olmo3": ("Olmo3Config", {"sliding_window": 4}, WINDOW | {"rope.freq_base": 500000.0}),
    "exaone4": ("Exaone4Config", {"sliding_window": 4}, WINDOW),
    "granite": (
        "GraniteConfig",
        FACTORS,
        GRANITE_KEYS,
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}, {}),
    "mistral3": (
        "Ministral3Config",
        {"head_dim": 16, "rope_parameters": GROWING},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 4,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.5,
        },
    ),
    "granitemoe": (
        "GraniteMoeSharedConfig",
        FACTORS | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 32},
    ),
    "granitemoe-without-shared": (
        "GraniteMoeConfig",
        FACTORS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        GRANITE_KEYS | {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 48},
        SMALL_EXPERTS | {"expert_count": 6, "expert_shared_feed_forward_length": 48},
    ),
    "glm4moe": (
        "Glm4MoeConfig",
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
        | {"first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True},
        SMALL_EXPERTS
        | SIGMOID
        | {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2}
        | {"expert_weights_scale": 1.5, "expert_shared_count": 2, "leading_dense_block_count": 2}
        | {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16}
        | {"nextn_predict_layers": 1, "block_count": 6},
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_interval": 2, "tie_word_embeddings": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        SMALL_EXPERTS
        | {"expert_count": 6, "expert_shared_count": 2, "expert_shared_feed_forward_length": 48}
        | {"leading_dense_block_count": 1, "interleave_moe_layer_step": 2},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        SIGMOID
        | {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 96}
        | {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16},
    ),
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
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
# Names in transformers -> names before the converter's table.
RENAMED = {
    "block_sparse_moe.router.": "mlp.gate.",
    "block_sparse_moe.": "mlp.",
    "mlp.router.weight": "mlp.gate.weight",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
    "mlp.shared_experts.": "mlp.shared_expert.",
    "gate.moe_statics.": "gate.",
    "mlp.e_score": "mlp.gate.e_score",
    "e_score_correction_bias": "e_score_correction.bias",
}
FFN_NORMS = ("granite", "granitemoe", "qwen2moe", "ernie4_5-moe", "minimax-m2", "mistral3")


def stored_name(name: str, architecture: str) -> str:
    """The converter's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, rest = name.partition("model.layers.")
    layer, _, rest = rest.partition(".")
    stem, _, kind = rest.rpartition(".")
    own = NAMES[stem]
    if architecture in FFN_NORMS and own == "post_attention_norm":
        own = "ffn_norm"
    return f"blk.{layer}.{own}.{kind}"


def stored(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """What the converter makes of a model's tensors: experts as stacks, and vectors in place of one row."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in hugging_face_weights(model).tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), value.chunk(2, 1), strict=True):
                tensors[f"{name.removesuffix('gate_up_proj')}{part}.weight"] = half
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate_proj", "up_proj"), value.chunk(2, 0), strict=True):
                tensors[name.replace("shared_mlp.input_linear", f"mlp.shared_expert.{part}")] = half
        else:
            name = name.replace("experts.down_proj", "experts.down_proj.weight")
            tensors[name] = value.squeeze()
    return {stored_name(name, architecture): value for name, value in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    class_name, fields, keys = CASES[case]
    with quiet_transformers():
        model = hugging_face_model(getattr(transformers, class_name)(**SIZES | fields))
    architecture = next(name for name in sorted(ARCHITECTURES, key=len)[::-1] if case.startswith(name))
    tensors = []
    for own, value in stored(model, architecture).items():
        if ARCHITECTURES[architecture].interleaves_heads and own.endswith(("attn_q.weight", "attn_k.weight")):
            value = converted(value, 4 if "attn_q" in own else 2)
        tensors.append(build.Tensor.of(own, value.numpy()))
        if "nextn_predict_layers" in keys and own.startswith("blk.4."):
            tensors.append(build.Tensor.of(own.replace("blk.4.", "blk.5."), value.numpy()))
    if "nextn_predict_layers" in keys:
        tensors.append(build.Tensor.of("blk.5.nextn.eh_proj.weight", np.zeros((64, 128), "f4")))
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
        own = {name: weights.shape(name) for name in weights.names() - draft_names(weights, config)}
        assert own == parameter_shapes(config)
        tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
        logits = run_chunked(PagedSequences(make_decoder(config, weights), block_size=4), {"a": tokens})["a"]
    torch.testing.assert_close(logits, hugging_face_logits(model, tokens), atol=2e-5, rtol=2e-5)
