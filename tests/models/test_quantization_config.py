"""quantization_config of config.json: what is refused, by name, and what is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TINY_LLAMA

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.models import ModelConfig, read_config, resolve_model
from octavo.models.formats.schemes import read_scheme

Fields = dict[str, Any]

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS, "output_activations": None}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
# Beside the fields of a format, in version 0.15.
AUTO_ROUND = {
    **{
        "autoround_version": "0.15.1",
        "data_type": "int",
        "enable_quanted_input": True,
        "provider": "auto-round",
    },
    **{"static_attention_granularity": "per_tensor", "static_kv_granularity": "per_tensor"},
    "to_quant_block_names": "model.layers",
}
OWN_AUTO_ROUND = AUTO_ROUND | {
    **{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    **{"bits": 4, "group_size": 128, "sym": True},
}
PACKED_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:.*gate$"],
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
}


def compressed(**group: Any) -> Fields:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | group}}


def packed(weights: Fields | None = None, **group: Any) -> Fields:
    inner = {
        "format": "pack-quantized",
        "input_activations": None,
        "weights": PACKED_WEIGHTS | (weights or {}),
    }
    return compressed(**(inner | group))


def integers(weights: Fields | None = None) -> Fields:
    inputs = INPUTS | {"type": "int"}
    return packed(weights, format="int-quantized", input_activations=inputs)


def small_floats(form: str, **weights: Any) -> Fields:
    inner = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return compressed(format=form, weights=inner | weights, input_activations=None)


# What is wrong, and what the message names.
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("fp8", FileFormatError, "quantization_config must be an object, got 'fp8'"),
    ([FP8], FileFormatError, "must be an object"),
    ({"bits": 4}, UnsupportedModelError, "quant_method None is not supported"),
    ({"quant_method": "fp9"}, UnsupportedModelError, "'fp9' is not supported; did you mean 'fp8'?"),
    ({"quant_method": 8}, UnsupportedModelError, "quant_method 8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, UnsupportedModelError, "'bitsandbytes'"),
    ({"quant_method": "hqq"}, UnsupportedModelError, "supported: auto-round, awq"),
    (FP8 | {"fmt": "e5m2"}, UnsupportedModelError, "fmt = 'e5m2' is not supported; supported: 'e4m3'"),
    (FP8 | {"activation_scheme": "none"}, UnsupportedModelError, "activation_scheme = 'none'"),
    (FP8 | {"activation_scheme": 3}, UnsupportedModelError, "activation_scheme = 3"),
    (FP8 | {"scale_fmt": "e8m0"}, UnsupportedModelError, "scale_fmt = 'e8m0'"),
    (FP8 | {"weight_block_size": [128]}, FileFormatError, "two positive integers"),
    (FP8 | {"weight_block_size": [128, 0]}, FileFormatError, "weight_block_size"),
    (FP8 | {"weight_block_size": [128, "128"]}, FileFormatError, "weight_block_size"),
    (FP8 | {"weight_block_size": [True, True]}, FileFormatError, "weight_block_size"),
    (FP8 | {"weight_block_size": [2**40, 1]}, FileFormatError, "weight_block_size"),
    (FP8 | {"weight_block_size": 128}, FileFormatError, "weight_block_size"),
    (FP8 | {"modules_to_not_convert": "lm_head"}, FileFormatError, "modules_to_not_convert must be a list"),
    (FP8 | {"ignored_layers": [3]}, FileFormatError, "ignored_layers must be a list"),
    (FP8 | {"ignored_layers": ["re:("]}, FileFormatError, "'re:(' is no pattern"),
    (FP8 | {"modules_to_convert": ["re:a{1,99999999999999999999}"]}, FileFormatError, "is no pattern"),
    (FP8 | {"ignored_layers": ["re:" + "(" * 4000 + ")" * 4000]}, FileFormatError, "is no pattern"),
    (FP8 | {"dequantize": True}, UnsupportedModelError, "dequantize = True"),
    (FP8 | {"expert_dtype": "fp4"}, UnsupportedModelError, "expert_dtype = 'fp4'"),
    (FP8 | {"kv_cache_scheme": "dynamic"}, FileFormatError, "kv_cache_scheme must be an object"),
    (FP8 | {"weight_blok_size": 3}, UnsupportedModelError, "unknown field 'weight_blok_size'; did you mean"),
    (MODELOPT | {"quant_algo": "NVFP4_SVD"}, UnsupportedModelError, "quant_algo = 'NVFP4_SVD' is not sup"),
    (MODELOPT | {"quant_algo": 8}, UnsupportedModelError, "quant_algo = 8 is not supported"),
    (MODELOPT | {"kv_cache_scheme": "NVFP4"}, UnsupportedModelError, "kv_cache_scheme = 'NVFP4'"),
    (MODELOPT | {"kv_cache_scheme": CACHE | {"num_bits": 4}}, UnsupportedModelError, "num_bits = 4"),
    (MODELOPT | {"has_zero_point": True}, UnsupportedModelError, "has_zero_point = True"),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, FileFormatError, "quantized_layers must be an object"),
    (
        MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP6"}}},
        UnsupportedModelError,
        "quantized_layers: b: quant_algo = 'FP6' is not supported",
    ),
    (
        MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A16_AWQ", "has_zero_point": True}}},
        UnsupportedModelError,
        "quantized_layers: a: has_zero_point = True",
    ),
    (MIXED | {"quantized_layers": {"a": "FP8"}}, FileFormatError, "quantized_layers: a must be an object"),
    (MIXED | {"quantized_layers": ["a"]}, FileFormatError, "quantized_layers must be an object"),
    (MODELOPT | {"quant_algo": None}, UnsupportedModelError, "quant_algo = None"),
    (MODELOPT | {"kv_cache_quant_algo": "INT8"}, UnsupportedModelError, "kv_cache_quant_algo = 'INT8'"),
    (MODELOPT | {"exclude_modules": {}}, FileFormatError, "exclude_modules"),
    (MODELOPT | {"lora_rank": 16}, UnsupportedModelError, "unknown field 'lora_rank'"),
    (COMPRESSED | {"format": "marlin-24"}, UnsupportedModelError, "format 'marlin-24' is not supported"),
    (COMPRESSED | {"format": None}, UnsupportedModelError, "format None"),
    (COMPRESSED | {"config_groups": [1]}, FileFormatError, "config_groups must be an object"),
    (
        COMPRESSED | {"config_groups": {"a": GROUP, "b": 3}},
        FileFormatError,
        "config_groups: b must be an object",
    ),
    (COMPRESSED | {"moe_sparsity_config": {"a": 1}}, UnsupportedModelError, "moe_sparsity_config = "),
    (COMPRESSED | {"config_groups": {"a": 3}}, FileFormatError, "config_groups: a must be an object"),
    (COMPRESSED | {"kv_cache_scheme": [1]}, FileFormatError, "kv_cache_scheme must be an object"),
    (COMPRESSED | {"kv_cache_scheme": INPUTS}, UnsupportedModelError, "kv_cache_scheme: dynamic = True"),
    (
        COMPRESSED | {"kv_cache_scheme": CACHE | {"type": "int"}},
        UnsupportedModelError,
        "scheme: type = 'int'",
    ),
    (COMPRESSED | {"kv_cache_scheme": CACHE | {"num_bits": 4}}, UnsupportedModelError, "num_bits = 4"),
    (COMPRESSED | {"kv_cache_scheme": CACHE | {"bits": 8}}, UnsupportedModelError, "unknown field 'bits'"),
    (COMPRESSED | {"ignore": ["re:["]}, FileFormatError, "'re:[' is no pattern"),
    (COMPRESSED | {"quantization_status": "initialized"}, UnsupportedModelError, "'initialized'"),
    (COMPRESSED | {"sparsity_config": {"format": "2:4"}}, UnsupportedModelError, "sparsity_config"),
    (COMPRESSED | {"transform_config": {"r": 1}}, UnsupportedModelError, "transform_config"),
    (COMPRESSED | {"formats": 3}, UnsupportedModelError, "unknown field 'formats'; did you mean 'format'"),
    (compressed(weights=WEIGHTS | {"num_bits": 4}), UnsupportedModelError, "num_bits = 4"),
    (compressed(weights=WEIGHTS | {"type": "int"}), UnsupportedModelError, "type = 'int'"),
    (compressed(weights=WEIGHTS | {"strategy": "group"}), UnsupportedModelError, "strategy = 'group'"),
    (compressed(weights=WEIGHTS | {"symmetric": False}), UnsupportedModelError, "symmetric = False"),
    (compressed(weights=WEIGHTS | {"dynamic": True}), UnsupportedModelError, "weights: dynamic = True"),
    (compressed(weights=WEIGHTS | {"strategy": "block"}), FileFormatError, "block_structure must be two"),
    (compressed(weights=WEIGHTS | {"bits": 8}), UnsupportedModelError, "unknown field 'bits'"),
    (compressed(weights=None), UnsupportedModelError, "weights: type = None"),
    (compressed(weights="all"), FileFormatError, "weights must be an object"),
    (
        compressed(input_activations=INPUTS | {"type": "int"}),
        UnsupportedModelError,
        "input_activations: type",
    ),
    (compressed(input_activations=INPUTS | {"dynamic": "local"}), UnsupportedModelError, "dynamic = 'local'"),
    (compressed(output_activations=INPUTS), UnsupportedModelError, "output_activations"),
    (compressed(targets="Linear"), FileFormatError, "targets must be a list"),
    ({"quant_method": "marlin"}, UnsupportedModelError, "quant_method 'marlin' is not supported"),
    ({"quant_method": "gptq_marlin"}, UnsupportedModelError, "quant_method 'gptq_marlin'"),
    (AWQ | {"bits": 3}, UnsupportedModelError, "bits = 3 is not supported; supported: 4"),
    (AWQ | {"bits": 8}, UnsupportedModelError, "bits = 8"),
    (AWQ | {"bits": None}, UnsupportedModelError, "bits = None"),
    (
        AWQ | {"version": "gemv"},
        UnsupportedModelError,
        "version = 'gemv' is not supported; supported: 'gemm'",
    ),
    (AWQ | {"version": "marlin"}, UnsupportedModelError, "version = 'marlin'"),
    (AWQ | {"version": "exllama"}, UnsupportedModelError, "version = 'exllama'"),
    (AWQ | {"format": "llm-awq"}, UnsupportedModelError, "format = 'llm-awq'"),
    (AWQ | {"desc_act": True}, UnsupportedModelError, "desc_act = True"),
    (AWQ | {"zero_point": "yes"}, UnsupportedModelError, "zero_point = 'yes'"),
    (AWQ | {"method": "paroquant"}, UnsupportedModelError, "method = 'paroquant'"),
    (AWQ | {"data_type": "nv_fp"}, UnsupportedModelError, "data_type = 'nv_fp'"),
    (AWQ | {"group_size": 0}, FileFormatError, "group_size must be an integer"),
    (AWQ | {"group_size": "128"}, FileFormatError, "group_size must be an integer"),
    (AWQ | {"group_size": None}, FileFormatError, "group_size is missing"),
    (AWQ | {"group_sice": 8}, UnsupportedModelError, "unknown field 'group_sice'; did you mean 'group_size'"),
    (AWQ | {"modules_to_not_convert": "lm_head"}, FileFormatError, "modules_to_not_convert must be a list"),
    (GPTQ | {"bits": 3}, UnsupportedModelError, "bits = 3 is not supported; supported: 4, 8"),
    (GPTQ | {"bits": 2}, UnsupportedModelError, "bits = 2"),
    (GPTQ | {"bits": None}, FileFormatError, "bits is missing"),
    (GPTQ | {"group_size": -2}, FileFormatError, "group_size must be an integer"),
    (GPTQ | {"desc_act": 1}, FileFormatError, "desc_act must be true or false"),
    (GPTQ | {"checkpoint_format": "marlin"}, UnsupportedModelError, "checkpoint_format = 'marlin'"),
    (GPTQ | {"checkpoint_format": "exllama"}, UnsupportedModelError, "checkpoint_format = 'exllama'"),
    (
        GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
        FileFormatError,
        "format must be checkpoint_format, 'gptq', got 'gptq_v2'",
    ),
    (GPTQ | {"is_marlin_format": True}, UnsupportedModelError, "is_marlin_format = True"),
    (GPTQ | {"pack_dtype": "int64"}, UnsupportedModelError, "pack_dtype = 'int64'"),
    (GPTQ | {"dynamic": {"+:lm_head": {"bits": 2}}}, UnsupportedModelError, "dynamic: +:lm_head: bits = 2"),
    (GPTQ | {"dynamic": {"+:lm_head": 8}}, FileFormatError, "dynamic: +:lm_head must be an object, got 8"),
    (GPTQ | {"method": "awq"}, UnsupportedModelError, "method = 'awq'"),
    (
        OWN_AUTO_ROUND | {"packing_format": "auto_round"},
        UnsupportedModelError,
        "packing_format = 'auto_round'",
    ),
    (OWN_AUTO_ROUND | {"data_type": "mx_fp"}, UnsupportedModelError, "data_type = 'mx_fp'"),
    (OWN_AUTO_ROUND | {"act_bits": 8}, UnsupportedModelError, "act_bits = 8"),
    (OWN_AUTO_ROUND | {"bits": 2}, UnsupportedModelError, "bits = 2"),
    (OWN_AUTO_ROUND | {"extra_config": {"a": {"bits": 8}}}, UnsupportedModelError, "extra_config: 'a' = "),
    (OWN_AUTO_ROUND | {"bitz": 4}, UnsupportedModelError, "unknown field 'bitz'"),
    (GPTQ | {"desc_akt": True}, UnsupportedModelError, "unknown field 'desc_akt'; did you mean 'desc_act'"),
    (packed({"num_bits": 3}), UnsupportedModelError, "num_bits = 3 is not supported; supported: 4, 8"),
    (packed({"type": "float"}), UnsupportedModelError, "type = 'float'"),
    (packed({"strategy": "tensor"}), UnsupportedModelError, "strategy = 'tensor'"),
    (packed({"group_size": None}), FileFormatError, "group_size is missing"),
    (packed({"group_size": -1}), FileFormatError, "group_size must be an integer"),
    (packed({"actorder": "random"}), UnsupportedModelError, "actorder = 'random'"),
    (packed({"symmetric": 1}), UnsupportedModelError, "symmetric = 1"),
    (packed(input_activations=INPUTS), UnsupportedModelError, "quantised input_activations"),
    (compressed(format="nvfp4-pack-quantized"), UnsupportedModelError, "num_bits = 8 is not supported"),
    (small_floats("mxfp4-pack-quantized", group_size=16), UnsupportedModelError, "group_size = 16"),
    (small_floats("nvfp4-pack-quantized"), UnsupportedModelError, "strategy = 'group' is not supported"),
    (small_floats("mxfp8-quantized"), UnsupportedModelError, "num_bits = 4 is not supported"),
    (small_floats("mxfp6-quantized"), UnsupportedModelError, "format 'mxfp6-quantized' is not supported"),
    (compressed(format="int-quantized"), UnsupportedModelError, "weights: type = 'float'"),
    (integers({"num_bits": 3}), UnsupportedModelError, "weights: num_bits = 3"),
    (integers({"actorder": "group"}), UnsupportedModelError, "weights: actorder = 'group'"),
    (integers({"strategy": "block"}), UnsupportedModelError, "weights: strategy = 'block'"),
]


@pytest.mark.parametrize(("value", "error", "named"), REFUSED)
def test_what_is_malformed_or_unknown_is_refused_by_name(
    value: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=re.escape(named)) as caught:
        ModelConfig.from_hf(TINY_LLAMA | {"quantization_config": value})
    assert "config.json: quantization_config" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        FP8,
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"], "scale_fmt": "ue8m0"},
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        FP8 | {"kv_cache_scheme": CACHE},
        MODELOPT,
        MODELOPT | {"quant_algo": "fp8_pb_wo", "kv_cache_scheme": "FP8"},
        MODELOPT | {"quant_algo": "fp8_pb_real"},
        MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": "FP8", "quantized_layers": {}},
        MODELOPT
        | {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True},
        MIXED | {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}}},
        small_floats("mxfp4-pack-quantized"),
        small_floats("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
        small_floats("mxfp8-quantized", num_bits=8),
        MODELOPT | {"producer": {"name": "modelopt"}, "kv_cache_quant_algo": None, "config_groups": {}},
        AWQ,
        AWQ | {"version": "GEMM", "modules_to_not_convert": None, "group_size": -1},
        GPTQ,
        GPTQ
        | {"group_size": -1, "bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2", "dynamic": None},
        integers(),
        integers({"strategy": "tensor", "group_size": None, "num_bits": 8}),
        packed(),
        packed({"strategy": "channel", "group_size": None, "symmetric": False, "num_bits": 8}),
        packed({"actorder": "group", "observer": "mse", "block_structure": None}),
        GPTQ | AUTO_ROUND | {"method": "gptq", "dynamic": {"-:.*mlp.gate": {}, "lm_head": {"bits": 8}}},
        AWQ | AUTO_ROUND | {"method": "awq", "zero_point": False},
        OWN_AUTO_ROUND,
        OWN_AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
        OWN_AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}},
        OWN_AUTO_ROUND
        | {
            "packing_format": "auto_round:fp8",
            "data_type": "fp",
            "weight_block_size": [128, 128],
            "act_bits": 8,
        },
        COMPRESSED | {"moe_sparsity_config": None, "provider": "auto-round"},
        COMPRESSED | {"config_groups": {"a": GROUP | {"format": None}}},
        COMPRESSED
        | {
            "format": "mixed-precision",
            "config_groups": {
                "a": GROUP | {"format": "float-quantized"},
                "b": packed()["config_groups"]["group_0"] | {"format": "pack-quantized"},
            },
        },
        compressed(format="naive-quantized", input_activations=None),
        COMPRESSED,
        COMPRESSED | {"kv_cache_scheme": CACHE | {"observer": "minmax", "group_size": None}},
        compressed(format="float-quantized", input_activations=None),
        compressed(weights=WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}),
        compressed(input_activations=INPUTS | {"dynamic": False, "strategy": "tensor"}),
    ],
)
def test_what_is_supported_changes_nothing_else(value: Fields) -> None:
    assert ModelConfig.from_hf(TINY_LLAMA | {"quantization_config": value}) == ModelConfig.from_hf(TINY_LLAMA)
    assert read_scheme({"quantization_config": value}) is not None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("FineGrainedFP8Config", {"weight_block_size": (128, 128)}),
        ("GPTQConfig", {"bits": 4, "group_size": 32}),
        ("AwqConfig", {"bits": 4, "group_size": 32}),
        ("Mxfp4Config", {}),
    ],
)
def test_what_transformers_writes_by_itself_is_supported(kind: str, options: Fields) -> None:
    """Trap: a new version writes more fields, all with values that change nothing."""
    transformers = pytest.importorskip("transformers")
    value = json.loads(json.dumps(getattr(transformers, kind)(**options).to_dict()))
    assert read_scheme({"quantization_config": value}) is not None


def test_the_older_name_of_the_field_is_known() -> None:
    assert read_scheme({"compression_config": COMPRESSED}) is not None


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    beside = tmp_path / "hf_quant_config.json"
    fields = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    source = resolve_model(str(tmp_path))
    assert read_scheme(read_config(source)) is not None
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | {"quantization_config": None}))
    assert read_scheme(read_config(source)) is not None
    beside.write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(
        FileFormatError, match=r"hf_quant_config\.json: expected quantization to be an object"
    ):
        read_config(source)
