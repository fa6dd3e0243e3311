"""GGUF tensors and metadata in Hugging Face's terms, for every architecture."""

import numpy as np
import pytest
import torch
from gguf_builder import Tensor, tensors_of
from gguf_cases import ARCHITECTURES, INTERLEAVED, converted, values

from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.checkpoint import check_tensors
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_and_tensors_fit_each_other(architecture, model):
    file = model(architecture)
    config = ModelConfig.from_hf(gguf_to_hf_config(file))
    check_tensors(GGUFWeights(file), parameter_shapes(config))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (16, 24, 20)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert {rope.theta for rope in config.ropes} >= {500000.0}
    assert config.max_position_embeddings == 128
    assert config.tie_word_embeddings


@pytest.mark.parametrize(("name", "num_heads"), [("q", 4), ("k", 2)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("architecture", INTERLEAVED)
def test_llama_heads_come_back_in_rotate_half_order(architecture, name, num_heads, kind, model):
    tensors = tensors_of(architecture, biases=True)
    stored = next(t for t in tensors if t.name == f"blk.1.attn_{name}.{kind}")
    original = values(tensors, stored.name)
    stored.data = converted(original, num_heads).numpy().tobytes()
    weights = GGUFWeights(model(architecture, tensors))
    hf_name = f"model.layers.1.self_attn.{name}_proj.{kind}"
    assert torch.equal(weights.read(hf_name, dtype=torch.float32), original)
    for rows in (slice(0, 8), slice(8, 16), slice(3, 5), slice(5, 14)):
        assert torch.equal(weights.read(hf_name, rows=rows, dtype=torch.float32), original[rows])
    if kind == "weight":
        part = weights.read(hf_name, rows=slice(8, 16), columns=slice(2, 9), dtype=torch.float32)
        assert torch.equal(part, original[8:16, 2:9])


def test_the_order_agrees_with_transformers(model):
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    tensors = tensors_of("llama")
    weights = GGUFWeights(model("llama", tensors))
    processor = LlamaTensorProcessor({"num_attention_heads": 4, "num_key_value_heads": 2})
    for name in ("q", "k"):
        stored = values(tensors, f"blk.0.attn_{name}.weight").numpy()
        expected = processor.process(stored, f"blk.0.attn_{name}.weight").weights
        ours = weights.read(f"model.layers.0.self_attn.{name}_proj.weight", dtype=torch.float32)
        assert (ours.numpy() == expected).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES[len(INTERLEAVED) :])
def test_other_architectures_keep_their_order(architecture, model):
    tensors = tensors_of(architecture)
    weights = GGUFWeights(model(architecture, tensors))
    for name in ("q", "k"):
        read = weights.read(f"model.layers.0.self_attn.{name}_proj.weight", dtype=torch.float32)
        assert torch.equal(read, values(tensors, f"blk.0.attn_{name}.weight"))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_norms_lose_the_one_that_the_converter_added(architecture, model):
    tensors = tensors_of(architecture)
    weights = GGUFWeights(model(architecture, tensors))
    names = {
        "model.norm": "output_norm",
        "model.layers.1.input_layernorm": "blk.1.attn_norm",
        "model.layers.1.post_attention_layernorm": "blk.1.post_attention_norm",
        "model.layers.1.pre_feedforward_layernorm": "blk.1.ffn_norm",
        "model.layers.1.post_feedforward_layernorm": "blk.1.post_ffw_norm",
    }
    if architecture == "gemma3":
        names["model.layers.1.self_attn.k_norm"] = "blk.1.attn_k_norm"
    for hf_name, name in names.items():
        read = weights.read(f"{hf_name}.weight", dtype=torch.float32)
        assert torch.equal(read, values(tensors, f"{name}.weight") - 1)


def test_llama_norms_and_mlp_are_taken_as_they_are(model):
    tensors = tensors_of("llama")
    weights = GGUFWeights(model("llama", tensors))
    names = {"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down"}
    for hf_name, name in names.items():
        read = weights.read(f"model.layers.0.{hf_name}.weight", dtype=torch.float32)
        assert torch.equal(read, values(tensors, f"blk.0.{name}.weight"))


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_shexp.weight",
        "blk.0.attn_qkv.weight",
        "blk.00.attn_q.weight",
        "v.patch_embd.weight",
        "x",
    ],
)
def test_unknown_tensors_are_refused_by_name(name, model):
    file = model("llama", [*tensors_of("llama"), Tensor.of(name, np.zeros(4))])
    with pytest.raises(UnsupportedModelError, match=f"{name!r} has no place"):
        GGUFWeights(file)


def test_tensors_of_three_dimensions_are_refused(model):
    tensors = [tensor for tensor in tensors_of("llama") if tensor.name != "token_embd.weight"]
    file = model("llama", [*tensors, Tensor.of("token_embd.weight", np.zeros((2, 3, 4)))])
    with pytest.raises(WeightsError, match=r"token_embd\.weight.*\[2, 3, 4\]"):
        GGUFWeights(file)


def test_a_missing_tensor_is_named_with_its_neighbour(model):
    with pytest.raises(WeightsError, match=r"did you mean 'model.layers.1.mlp.up_proj.weight'"):
        GGUFWeights(model("llama")).read("model.layers.1.mlp.upproj.weight", dtype=torch.float32)


def test_rows_that_are_no_whole_heads_are_refused(model):
    weights = GGUFWeights(model("llama", attention__head_count=3))
    with pytest.raises(FileFormatError, match=r"attn_q\.weight to have 3 heads"):
        weights.read("model.layers.0.self_attn.q_proj.weight", dtype=torch.float32)
