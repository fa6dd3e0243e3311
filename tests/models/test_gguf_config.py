"""The configuration that a GGUF file describes, and what of it is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_builder import SIZES, Tensor, tensors_of
from gguf_cases import converted, values

from octavo.config import Task
from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.models import ModelConfig, ModelSource, parameter_shapes, read_model
from octavo.models.checkpoint import check_tensors
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config


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
        # As for llama.cpp, a factor without a type is linear.
        assert gguf_to_hf_config(model("llama", rope__scaling__factor=8.0))["rope_scaling"] == {
            "rope_type": "linear",
            "factor": 8.0,
        }
        old = gguf_to_hf_config(model("llama", rope__scale_linear=2.0))
        assert old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        with pytest.raises(UnsupportedModelError, match="longrope"):
            gguf_to_hf_config(model("llama", rope__scaling__type="longrope"))

    def test_a_file_says_how_it_pools(self, model):
        def pooling(task: Task = "auto", **more):
            file = model("qwen3", **more)
            found = read_model(ModelSource("gguf", Path("model.gguf"), file), task).pooling
            return None if found is None else found.tokens

        assert pooling() is pooling(pooling_type=0) is pooling("generate", pooling_type=3) is None
        assert pooling(pooling_type=3) == pooling("embed") == "last"
        assert pooling(pooling_type=1) == "mean"
        for other in (2, 4):
            with pytest.raises(UnsupportedModelError, match="pooling"):
                pooling(pooling_type=other)

    def test_biases_are_seen_in_the_tensors(self, model):
        config = gguf_to_hf_config(model("llama", tensors_of("llama", biases=True)))
        assert config["attention_bias"] is True

    def test_every_end_of_text_counts_and_none_means_none(self, model):
        more = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("bos", "eos", "eot"))}
        config = gguf_to_hf_config(model("llama", more=more))
        assert (config["bos_token_id"], config["eos_token_id"]) == (0, [1, 2])
        assert ModelConfig.from_hf(gguf_to_hf_config(model("llama"))).eos_token_ids == frozenset()

    def test_every_fourth_layer_of_smollm3_does_not_rotate(self, model):
        config = ModelConfig.from_hf(gguf_to_hf_config(model("smollm3", block_count=8)))
        assert config.layer_ropes == (0, 0, 0, 1) * 2
        assert config.ropes[1].factors is not None
        assert set(config.ropes[1].factors) == {float("inf")}

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
            ("mistral3", "attention__temperature_scale", 0.1),
            ("llama", "rope__scaling__attn_factor", 1.2),
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
        with pytest.raises(UnsupportedModelError, match=r"'mambo' is not supported.*llama"):
            gguf_to_hf_config(model("mambo"))
        with pytest.raises(FileFormatError, match=r"general\.architecture"):
            gguf_to_hf_config(model("llama", more={"general.architecture": 3}))

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("deepseek2", "keys that are compressed into one latent row are not supported; supported: llama"),
            ("phimoe", "norms that subtract the mean are not"),
            ("gemma3n", "several residual streams are not"),
            ("clip", "it holds an encoder of images or sound"),
            ("phi", "did you mean 'phi3'"),
        ],
    )
    def test_architectures_that_lack_something_are_refused_with_it(self, name, reason, model):
        with pytest.raises(UnsupportedModelError, match=rf"{name!r} is not supported[:;] {reason}"):
            gguf_to_hf_config(model(name))

    @pytest.mark.parametrize(
        ("architecture", "layout"),
        [("llama", "reference"), ("llama", "Meta AI original pth"), ("qwen2", "reference")],
    )
    def test_a_layout_of_tensors_is_read_as_the_order_it_names(self, architecture, layout, model):
        """Files of llama's architecture are in Meta's order with and without the key, as for llama.cpp."""

        def read(**options):
            weights = GGUFWeights(model(architecture, **options))
            return {name: weights.read(name, dtype=torch.float32) for name in weights.names()}

        expected = read()
        for name, found in read(tensor_data_layout=layout).items():
            assert torch.equal(found, expected.pop(name))
        assert not expected

    @pytest.mark.parametrize(
        ("architecture", "layout"),
        [
            ("llama", "jploski"),
            ("llama", "meta ai original pth"),
            ("llama", ""),
            ("qwen3", "Meta AI original pth"),
            ("mistral3", "Meta AI original pth"),
            ("llama", 1),
        ],
    )
    def test_other_layouts_of_tensors_are_refused_by_name(self, architecture, layout, model):
        with pytest.raises(UnsupportedModelError, match=f"tensor_data_layout = {layout!r} is not supported"):
            gguf_to_hf_config(model(architecture, tensor_data_layout=layout))

    @pytest.mark.parametrize("key", ["yarn_log_multiplier", "yarn_beta_fast", "yarn_ext_factor"])
    def test_what_a_yarn_scaling_does_not_say_is_the_default(self, key, model):
        """0 is what mscale_all_dim: 0 becomes: as if it were not there."""
        yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
        neutral = {"yarn_log_multiplier": 0.0, "yarn_beta_fast": 32.0, "yarn_ext_factor": -1.0}[key]
        config = gguf_to_hf_config(model("llama", **yarn, **{f"rope__scaling__{key}": neutral}))
        assert config == gguf_to_hf_config(model("llama", **yarn))
        with pytest.raises(UnsupportedModelError, match=key):
            gguf_to_hf_config(model("llama", **yarn, **{f"rope__scaling__{key}": neutral + 0.5}))
