"""GGUF tensors and metadata in Hugging Face's terms, for every architecture."""

import gguf_builder as build
import numpy as np
import pytest
import torch
from gguf_builder import SIZES, Tensor, metadata_of, tensors_of

from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.checkpoint import check_tensors
from octavo.models.formats.gguf.config import gguf_to_hf_config
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.weights import GGUFWeights

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.fixture
def model(tmp_path):
    """Write a tiny model and open it; options as those of metadata_of."""
    files = []

    def make(architecture, tensors=None, more=None, **options):
        metadata = metadata_of(architecture, **options) | (more or {})
        files.append(
            GGUFFile.open(build.write(tmp_path / "m.gguf", metadata, tensors or tensors_of(architecture)))
        )
        return files[-1]

    yield make
    for file in files:
        file.close()


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
def test_llama_heads_come_back_in_rotate_half_order(name, num_heads, kind, model):
    tensors = tensors_of("llama", biases=True)
    stored = next(t for t in tensors if t.name == f"blk.1.attn_{name}.{kind}")
    original = values(tensors, stored.name)
    stored.data = converted(original, num_heads).numpy().tobytes()
    weights = GGUFWeights(model("llama", tensors))
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


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
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


class TestConfig:
    def test_untied_embeddings(self, model):
        output = Tensor.of("output.weight", np.zeros((SIZES["vocab"], SIZES["hidden"])))
        config = gguf_to_hf_config(model("llama", [*tensors_of("llama"), output]))
        assert config["tie_word_embeddings"] is False

    def test_rope_factors_become_part_of_the_config(self, model):
        factors = [1.0, 1.0, 2.5, 8.0]
        file = model("llama", [*tensors_of("llama"), Tensor.of("rope_freqs.weight", np.array(factors))])
        config = gguf_to_hf_config(file)
        assert config["rope_scaling"] == {"rope_type": "factors", "factors": factors}
        assert ModelConfig.from_hf(config).ropes[0].factors == tuple(factors)
        check_tensors(GGUFWeights(file), parameter_shapes(ModelConfig.from_hf(config)))

    def test_rope_factors_of_another_length_are_refused(self, model):
        file = model("llama", [*tensors_of("llama"), Tensor.of("rope_freqs.weight", np.ones(5))])
        with pytest.raises(FileFormatError, match="rope_freqs"):
            gguf_to_hf_config(file)

    def test_rope_scaling(self, model):
        linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
        config = gguf_to_hf_config(model("gemma3", **linear))
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
        config = gguf_to_hf_config(model("qwen2", rope__scaling__original_context_length=32, **yarn))
        assert config["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        old = gguf_to_hf_config(model("llama", rope__scale_linear=2.0))
        assert old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        with pytest.raises(UnsupportedModelError, match="longrope"):
            gguf_to_hf_config(model("llama", rope__scaling__type="longrope"))

    def test_biases_are_seen_in_the_tensors(self, model):
        config = gguf_to_hf_config(model("llama", tensors_of("llama", biases=True)))
        assert config["attention_bias"] is True

    def test_every_end_of_text_counts_and_none_means_none(self, model):
        more = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("bos", "eos", "eot"))}
        config = gguf_to_hf_config(model("llama", more=more))
        assert (config["bos_token_id"], config["eos_token_id"]) == (0, [1, 2])
        assert ModelConfig.from_hf(gguf_to_hf_config(model("llama"))).eos_token_ids == frozenset()

    def test_gemma_fields(self, model):
        options = {
            "attention__sliding_window": 64,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        }
        config = ModelConfig.from_hf(gguf_to_hf_config(model("gemma2", **options)))
        assert (config.attention_softcap, config.final_softcap) == (40.0, 20.0)
        assert config.layer_windows == (64, None)
        assert config.attention_scale == 8**-0.5
        assert config.activation == "gelu_tanh"

    def test_gemma3_layers_and_thetas(self, model):
        options = {"attention__sliding_window": 64, "rope__freq_base": 1e6, "rope__freq_base_swa": 5000.0}
        config = gguf_to_hf_config(
            model("gemma3", attention__sliding_window_pattern=[False, True], **options)
        )
        assert ModelConfig.from_hf(config).layer_windows == (None, 64)
        assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 5000.0)
        config = gguf_to_hf_config(model("gemma3", **options))
        assert ModelConfig.from_hf(config).layer_windows == (64, 64)
        assert ModelConfig.from_hf(gguf_to_hf_config(model("gemma3"))).layer_windows == (None, None)

    def test_the_27b_models_scale_attention_by_the_hidden_size(self, model):
        config = gguf_to_hf_config(model("gemma2", block_count=46, embedding_length=36))
        assert config["query_pre_attn_scalar"] == 9

    def test_sizes_per_layer_must_agree(self, model):
        assert gguf_to_hf_config(model("llama", feed_forward_length=[24, 24]))["intermediate_size"] == 24
        with pytest.raises(FileFormatError, match="feed_forward_length"):
            gguf_to_hf_config(model("llama", feed_forward_length=[24, 32]))
        tensors = tensors_of("llama")
        weights = GGUFWeights(model("llama", tensors, attention__head_count_kv=[2, 2]))
        read = weights.read("model.layers.0.self_attn.k_proj.weight", dtype=torch.float32)
        assert torch.equal(converted(read, 2), values(tensors, "blk.0.attn_k.weight"))

    @pytest.mark.parametrize(
        ("architecture", "key", "value"),
        [
            ("qwen3", "expert_count", 8),
            ("llama", "attention__sliding_window", 4096),
            ("llama", "attention__causal", False),
            ("llama", "logit_scale", 0.5),
            ("llama", "rope__dimension_count", 4),
            ("qwen3", "attention__value_length", 16),
            ("qwen2", "something_new", 1),
        ],
    )
    def test_keys_that_change_the_network_are_refused_by_name(self, architecture, key, value, model):
        with pytest.raises(UnsupportedModelError, match=key.replace("__", r"\.")):
            gguf_to_hf_config(model(architecture, **{key: value}))

    @pytest.mark.parametrize(
        "key", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon", "context_length"]
    )
    def test_malformed_keys_are_named(self, key, model):
        for value in ("many", 0, [1.5]):
            with pytest.raises(FileFormatError, match=key):
                gguf_to_hf_config(model("llama", **{key.replace(".", "__"): value}))

    @pytest.mark.parametrize("value", [[1, 2], ["a", "b"], [True, False]])
    @pytest.mark.parametrize(
        "key",
        [
            "llama.expert_count",
            "llama.rope.scaling.type",
            "llama.rope.scale_linear",
            "llama.attention.head_count",
            "split.count",
            "tokenizer.ggml.eos_token_id",
        ],
    )
    def test_arrays_in_place_of_single_values_are_refused(self, key, value, model):
        with pytest.raises(FileFormatError, match=key):
            gguf_to_hf_config(model("llama", more={key: value}))

    @pytest.mark.parametrize("value", [[True], [True, False, True], [1, 2], ["a", "b"]])
    def test_a_sliding_pattern_has_one_value_per_layer(self, value, model):
        file = model("gemma3", attention__sliding_window=4, attention__sliding_window_pattern=value)
        with pytest.raises(FileFormatError, match="sliding_window_pattern"):
            gguf_to_hf_config(file)

    def test_unknown_architectures_are_refused(self, model):
        with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported.*llama"):
            gguf_to_hf_config(model("mamba"))
        with pytest.raises(FileFormatError, match=r"general\.architecture"):
            gguf_to_hf_config(model("llama", more={"general.architecture": 3}))

    def test_one_part_of_several_is_refused(self, model):
        with pytest.raises(UnsupportedModelError, match="several parts"):
            gguf_to_hf_config(model("llama", more={"split.count": 3}))
