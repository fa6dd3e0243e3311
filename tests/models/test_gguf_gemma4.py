"""GGUF files of Gemma 4, as llama.cpp's converter writes them, against transformers."""

import re
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
from test_decoder_families import GEMMA4, GEMMA4_SHARED, GEMMA4_WIDE, make_prompts

from octavo.errors import FileFormatError, OctavoError, UnsupportedModelError
from octavo.models import ModelConfig
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config

transformers = pytest.importorskip("transformers")

EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
CASES: dict[str, dict[str, Any]] = {
    "e4b": GEMMA4 | {"num_kv_shared_layers": 2, "tie_word_embeddings": True},
    "e2b": GEMMA4_SHARED,
    "31b": GEMMA4_WIDE,
    "26b-a4b": GEMMA4_WIDE | EXPERTS,
}
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    **{f"self_attn.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
    **{f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}


def stored_name(name: str) -> str:
    layer, rest = re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
    return NAMES[rest] if layer is None else f"blk.{layer}.{NAMES[rest]}"


def metadata_of(fields: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What the converter writes of a published fields["json"], and of its rotary parameters."""
    count, num_shared = fields["num_hidden_layers"], fields.get("num_kv_shared_layers", 0)
    slides = [kind == "sliding_attention" for kind in fields["layer_types"]]
    num_heads = fields["num_key_value_heads"]
    own: dict[str, Any] = {
        "block_count": count,
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": num_heads,
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "attention.sliding_window": fields["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": num_shared,
        "attention.key_length": fields["global_head_dim"],
        "attention.value_length": fields["global_head_dim"],
        "attention.key_length_swa": fields["head_dim"],
        "attention.value_length_swa": fields["head_dim"],
        "rope.dimension_count": fields["global_head_dim"],
        "rope.dimension_count_swa": fields["head_dim"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": fields["hidden_size_per_layer_input"],
        "final_logit_softcapping": fields["final_logit_softcapping"],
    }
    if fields.get("use_double_wide_mlp"):
        wide = [fields["intermediate_size"] * (1 + (index >= count - num_shared)) for index in range(count)]
        own["feed_forward_length"] = wide
    if "num_global_key_value_heads" in fields:
        heads = (fields["num_global_key_value_heads"], num_heads)
        own["attention.head_count_kv"] = [heads[sliding] for sliding in slides]
    if "enable_moe_block" in fields:
        own |= {"expert_count": fields["num_experts"], "expert_used_count": fields["top_k_experts"]}
        own["expert_feed_forward_length"] = fields["moe_intermediate_size"]
    return {"general.architecture": "gemma4"} | {f"gemma4.{key}": value for key, value in own.items()}


def write(
    folder: Path, model: Any, fields: dict[str, Any], *, splits_experts: bool = False, **changed: Any
) -> GGUFFile:
    """Write a file as the converter does; `changed` has "__" for a dot."""
    tensors: list[build.Tensor] = []
    for name, value in hugging_face_weights(model).tensors.items():
        own = stored_name(name)
        if splits_experts and "gate_up" in own:
            for part, half in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                tensors.append(build.Tensor.of(own.replace("gate_up", part), half.numpy()))
        else:
            tensors.append(build.Tensor.of(own, value.numpy()))
    rope, size = model.config.rope_parameters, fields["global_head_dim"] // 2
    turning = int(size * rope["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * turning + [1e30] * (size - turning))
    tensors.append(build.Tensor.of("rope_freqs.weight", factors))
    own = {f"gemma4.{key.replace('__', '.')}": value for key, value in changed.items()}
    return GGUFFile.open(build.write(folder / "m.gguf", metadata_of(fields, rope) | own, tensors))


def make_model(fields: dict[str, Any]) -> Any:
    with quiet_transformers():
        return hugging_face_model(transformers.Gemma4TextConfig(**fields))


@pytest.mark.parametrize("case", [*CASES, "26b-a4b-split"])
def test_a_file_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    fields = CASES[case.removesuffix("-split")]
    model = make_model(fields)
    file = write(tmp_path, model, fields, splits_experts=case.endswith("-split"))
    config = ModelConfig.from_hf(gguf_to_hf_config(file))
    prompts = make_prompts(97)
    weights: Any
    with closing(GGUFWeights(file)) as weights:
        logits = run_chunked(PagedSequences(make_decoder(config, weights), block_size=4), prompts)
    for name, tokens in prompts.items():
        torch.testing.assert_close(logits[name], hugging_face_logits(model, tokens), atol=2e-5, rtol=2e-5)


def test_a_file_says_the_same_as_config_json(tmp_path: Path) -> None:
    for fields in CASES.values():
        found = ModelConfig.from_hf(gguf_to_hf_config(write(tmp_path, make_model(fields), fields)))
        expected = ModelConfig.from_hf(fields | {"architectures": ["Gemma4ForCausalLM"]})
        for name in ("cache_layers", "layer_caches", "layer_windows", "experts", "layer_input_size"):
            assert getattr(found, name) == getattr(expected, name)
        layers = range(found.num_layers)
        for method in (ModelConfig.keys_are_values, ModelConfig.feed_forward_size):
            assert [method(found, i) for i in layers] == [method(expected, i) for i in layers]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"feed_forward_length": [32, 32, 32, 32, 64]}, FileFormatError, "one for each of 6 layers"),
        ({"feed_forward_length": [32, 32, 48, 32, 32, 32]}, UnsupportedModelError, "feed_forward_length"),
        ({"attention__head_count_kv": [1.5] * 6}, FileFormatError, "attention.head_count_kv"),
        ({"attention__sliding_window_pattern": 3}, FileFormatError, "true or false for each layer"),
        ({"attention__value_length_swa": 8}, UnsupportedModelError, "value_length_swa = 8"),
        ({"rope__dimension_count_swa": 8}, UnsupportedModelError, "dimension_count_swa = 8"),
        ({"attention__shared_kv_layers": 6}, FileFormatError, "attention.shared_kv_layers"),
    ],
)
def test_what_is_refused(
    changed: dict[str, Any], error: type[OctavoError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        gguf_to_hf_config(write(tmp_path, make_model(GEMMA4), GEMMA4, **changed))
