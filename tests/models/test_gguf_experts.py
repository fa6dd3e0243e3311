"""GGUF files with experts, which stack each projection of a layer's experts in one tensor."""

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
from gguf_builder import Tensor
from gguf_cases import converted

from octavo.errors import ConfigError, FileFormatError, UnsupportedModelError, WeightsError
from octavo.gemm.cpu import block_linear as blocks
from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.gemm.expert_choice import Choice
from octavo.layers.experts import ListedExperts
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config
from octavo.parallel import TensorParallel

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
HF_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "MixtralConfig",
        {"num_local_experts": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen3moe-dense-layers": (
        "Qwen3MoeConfig",
        {"num_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3moe-without-experts": (
        "Qwen3MoeConfig",
        {"num_experts": 5, "moe_intermediate_size": 32, "mlp_only_layers": [0, 1]},
    ),
    "qwen3moe-zero-experts": ("Qwen3MoeConfig", {"num_experts": 0, "moe_intermediate_size": 32}),
    "qwen3moe": ("Qwen3MoeConfig", {"num_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4}),
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
Q8_0 = 8


def hf_model(architecture: str) -> Any:
    class_name, fields = HF_CONFIGS[architecture]
    with quiet_transformers():
        return hugging_face_model(getattr(transformers, class_name)(**SIZES | fields))


def q8_0(name: str, values: np.ndarray) -> Tensor:
    """A tensor in blocks of 32 numbers: a float16 scale, then 8-bit integers."""
    rows = values.reshape(-1, 32)
    scales = (np.abs(rows).max(1, keepdims=True) / 127).astype("<f2")
    integers = np.round(rows / scales.astype("f4")).astype("i1")
    data = np.concatenate([scales.view("u1"), integers.view("u1")], axis=1).tobytes()
    return Tensor(name, tuple(reversed(values.shape)), data, kind=Q8_0)


def tensors_of(model: Any, *, quantised: bool = False) -> list[Tensor]:
    """What llama.cpp's converter makes of a model."""
    config, tensors = model.config, []
    for name, value in hugging_face_weights(model).tensors.items():
        _, _, rest = name.partition("model.layers.")
        layer, _, rest = rest.partition(".")
        stem = rest or name
        if stem == "mlp.experts.gate_up_proj":
            parts = zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), value.chunk(2, 1), strict=True)
        else:
            parts = [(NAMES[stem], value)]
        for own, part in parts:
            if model.config.model_type == "mixtral" and own in ("attn_q.weight", "attn_k.weight"):
                heads = config.num_attention_heads if own == "attn_q.weight" else config.num_key_value_heads
                part = converted(part, heads)
            full = f"blk.{layer}.{own}" if rest else own
            make = q8_0 if quantised and own.endswith("exps.weight") else Tensor.of
            tensors.append(make(full, part.numpy()))
    return tensors


def metadata_of(case: str, model: Any, **more: object) -> dict[str, object]:
    config, architecture = model.config, case.partition("-")[0]
    number = getattr(config, "num_local_experts", None) or config.num_experts
    own: dict[str, object] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "expert_count": number,
        "expert_used_count": 2,
    }
    if architecture == "qwen3moe":
        own["expert_feed_forward_length"] = 32
        own |= {"attention.key_length": 16, "attention.value_length": 16}
    own |= more
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in own.items()}


def open_model(path: Path, architecture: str, model: Any, **options: Any) -> tuple[ModelConfig, GGUFWeights]:
    tensors = tensors_of(model, **options)
    file = GGUFFile.open(build.write(path / "m.gguf", metadata_of(architecture, model), tensors))
    return ModelConfig.from_hf(gguf_to_hf_config(file)), GGUFWeights(file)


@pytest.mark.parametrize("architecture", HF_CONFIGS)
def test_a_file_gives_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = hf_model(architecture)
    config, weights = open_model(tmp_path, architecture, model)
    assert {name: weights.shape(name) for name in weights.names()} == parameter_shapes(config)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    logits = run_chunked(PagedSequences(make_decoder(config, weights), block_size=4), {"a": tokens})["a"]
    torch.testing.assert_close(logits, hugging_face_logits(model, tokens), atol=2e-4, rtol=1e-4)
    weights.close()


@pytest.mark.skipif(
    blocks.unsupported_reason(torch.device("cpu"), torch.float32) is not None, reason="needs a C compiler"
)
def test_experts_stay_in_blocks(tmp_path: Path) -> None:
    config, weights = open_model(tmp_path, "qwen3moe", hf_model("qwen3moe"), quantised=True)
    decoders = [make_decoder(config, weights, quantization=kind) for kind in ("auto", "none")]
    in_blocks, exact = (decoder.layers[0].feed_forward.experts for decoder in decoders)
    assert isinstance(in_blocks, ListedExperts)
    assert all(isinstance(linear, BlockLinear) for linear in (*in_blocks.gate_up, *in_blocks.down))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    choice = decoders[1].layers[0].feed_forward.router(x)
    expected = exact(x, choice)
    torch.testing.assert_close(
        in_blocks(x, choice), expected, atol=0.02 * float(expected.abs().max()), rtol=0
    )
    for num_rows in range(1, 20):
        part = Choice(*(tensor[:num_rows] for tensor in choice))
        assert torch.equal(in_blocks(x[:num_rows], part), in_blocks(x, choice)[:num_rows])
    weights.close()


def test_ranks_hold_whole_experts_in_blocks(tmp_path: Path) -> None:
    """Of 32 columns, a block, no rank can have a half; of five experts, one rank has three."""
    config, weights = open_model(tmp_path, "qwen3moe", hf_model("qwen3moe"), quantised=True)
    options = {"quantization": "auto", "expert_parallel": True}
    ranks = [TensorParallel.not_met(rank, 2) for rank in range(2)]
    one, *two = (
        make_decoder(config, weights, parallel=each, **options).layers[1].feed_forward
        for each in (TensorParallel(), *ranks)
    )
    assert [len(each.experts.down) for each in (one, *two)] == [5, 2, 3]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    expected = one.experts(x, one.router(x))
    found = sum(each.experts(x, each.router(x)) for each in two)
    torch.testing.assert_close(found, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"use fewer ranks.*, or expert_parallel=True"):
        make_decoder(config, weights, parallel=ranks[1], quantization="auto")
    weights.close()


def test_a_part_of_an_expert(tmp_path: Path) -> None:
    model = hf_model("qwen3moe")
    _, weights = open_model(tmp_path, "qwen3moe", model)
    stack = hugging_face_weights(model).tensors["model.layers.1.mlp.experts.down_proj"]
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    part = weights.read(name, rows=slice(3, 9), columns=slice(5, 21), dtype=torch.float32)
    assert torch.equal(part, stack[4, 3:9, 5:21])
    weights.close()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = hf_model("qwen3moe")
    tensors = tensors_of(model)
    path = tmp_path / "m.gguf"

    def load(metadata: dict[str, object], tensors: list[Tensor]) -> None:
        file = GGUFFile.open(build.write(path, metadata, tensors))
        with closing(file):
            make_decoder(ModelConfig.from_hf(gguf_to_hf_config(file)), GGUFWeights(file))

    with pytest.raises(FileFormatError, match="num_experts_per_tok must be an integer in"):
        load(metadata_of("qwen3moe", model, expert_used_count=6), tensors)
    with pytest.raises(WeightsError, match=r"lacks model.layers.0.mlp.experts.5.gate_proj.weight"):
        load(metadata_of("qwen3moe", model, expert_count=6), tensors)
    with pytest.raises(UnsupportedModelError, match="expert_shared_count = 1 is not supported"):
        load(metadata_of("qwen3moe", model, expert_shared_count=1), tensors)
    flat = Tensor.of("blk.0.ffn_up_exps.weight", np.zeros((160, 64), "f4"))
    others = [tensor for tensor in tensors if tensor.name != flat.name]
    with pytest.raises(WeightsError, match=r"ffn_up_exps.weight to have 3 dimensions, got \[160, 64\]"):
        load(metadata_of("qwen3moe", model), [*others, flat])
    old = Tensor.of("blk.0.ffn_up.0.weight", np.zeros((32, 64), "f4"))
    with pytest.raises(UnsupportedModelError, match=r"ffn_up.0.weight' has no place"):
        load(metadata_of("qwen3moe", model), [*tensors, old])
