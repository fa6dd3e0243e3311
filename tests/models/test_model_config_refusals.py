"""What a config.json may not say, and how it is refused."""

import contextlib
from typing import Any

import pytest
from model_config_cases import LLAMA, read

from octavo.errors import FileFormatError, OctavoError, UnsupportedModelError


def test_unsupported_architectures_are_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LamaForCausalLM.*did you mean.*LlamaForCausalLM"):
        read(LLAMA | {"architectures": ["LamaForCausalLM"]})
    for nameless in ({}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}, {"model_type": 3}):
        with pytest.raises(UnsupportedModelError, match="supported: llama"):
            read(nameless)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "Llama4ForConditionalGeneration",
            r"attention within chunks is not",
        ),
        ("Qwen3_5ForCausalLM", r"layers of linear attention are not"),
        ("Qwen3_5MoeForCausalLM", r"layers of linear attention are not"),
        ("Gemma3nForCausalLM", r"several residual streams are not"),
        ("MambaForCausalLM", r"state spaces and convolutions in place of attention are not"),
        ("PhiForCausalLM", r"norms that subtract the mean are not"),
        ("MllamaForConditionalGeneration", r"images are not; a checkpoint of the text model alone is"),
        ("MaximinForCausalLM", r"'MaximinForCausalLM' is not supported; supported: "),
    ],
)
def test_what_is_missing_of_an_architecture_is_said(architecture: str, message: str) -> None:
    """And nothing is suggested that only ends alike."""
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(LLAMA | {"architectures": [architecture]})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
            "quantization_config",
        ),
        ({"num_experts": 8}, "num_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attention_multiplier": 0.01}, "attention_multiplier"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_act": "relu"}, "relu"),
        ({"layer_types": ["sliding_attention"] * 30}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 30}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "mrope"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "Qwen3_5ForCausalLM.* layers of linear attention"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"rope_scaling": {"rope_type": "linear", "facter": 2.0}}, r"facter.*did you mean 'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_what_would_change_the_network_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(LLAMA | fields)


def test_neutral_values_of_such_keys_are_accepted() -> None:
    neutral = {
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "num_experts": 0,
        "sliding_window": None,
        "rope_interleaved": False,
        "pretraining_tp": 1,
        "transformers_version": "4.42.3",
    }
    assert read(LLAMA | neutral) == read(LLAMA)


def test_a_quantised_cache_is_no_quantised_network() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    assert read(LLAMA | {"quantization_config": quantization}) == read(LLAMA)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size must be an integer in \[1, \d+\], got 0"),
        ({"hidden_size": 576.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_key_value_heads": 2}, "must divide num_attention_heads = 9, got 2"),
        ({"num_key_value_heads": 10}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim must be even, got 63"),
        ({"head_dim": 0}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, r"less than 2\*\*31 with yarn's factor"),
        ({"rope_parameters": {"full_attention": {}, "other": {}}}, "rope_parameters"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 30 names"),
        ({"bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_malformed_fields_are_refused_with_what_was_expected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read(LLAMA | fields)


def test_no_field_of_any_wrong_type_escapes_the_error_tree() -> None:
    wrong: list[Any] = [None, True, -1, 0, 2**70, 1.5, float("nan"), "x", [], [1], {}, {"a": 1}]
    for name in [*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "layer_types", "sliding_window"]:
        for value in wrong:
            with contextlib.suppress(OctavoError):
                read(LLAMA | {name: value})
