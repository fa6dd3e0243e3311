"""Text models inside checkpoints that also read images: exact against transformers, by any names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import (
    PagedSequences,
    hugging_face_greedy,
    hugging_face_logits,
    make_decoder,
    quiet_transformers,
    run_chunked,
)
from safetensors.torch import load_file, save_file
from test_decoder_families import GEMMA4_SHARED, GEMMA4_UNIFIED, GEMMA4_WIDE, MINISTRAL3, SMALL, make_prompts
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.models import ModelConfig
from octavo.models.experts.names import with_expert_names
from octavo.models.families.text_parts import TEXT_PARTS, own_name
from octavo.models.source import ModelSource, open_weights, read_config

transformers = pytest.importorskip("transformers")

NO_HEAD_DIM = {key: value for key, value in SMALL.items() if key not in ("head_dim", "tie_word_embeddings")}
TEXT = NO_HEAD_DIM | {"head_dim": 16}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
DEEP = QWEN_TOWER | {"deepstack_visual_indexes": [0]}
OLD_TOWER = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}}
INTERLEAVED = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
GEMMA4_TOWER = {key: value for key, value in TOWER.items() if key != "image_size"} | {"head_dim": 16}
GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
MOE = INTERLEAVED | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Class of the config, fields of the text model, the vision tower, other fields.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", TEXT | GEMMA, TOWER, {"mm_tokens_per_image": 1}),
    "gemma4": ("Gemma4Config", GEMMA4_SHARED, GEMMA4_TOWER, {}),
    "gemma4-experts": (
        "Gemma4Config",
        GEMMA4_WIDE
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        GEMMA4_TOWER,
        {},
    ),
    "gemma4-unified": ("Gemma4UnifiedConfig", GEMMA4_UNIFIED, {"mm_embed_dim": 24}, {}),
    "llava": ("LlavaConfig", TEXT | {"model_type": "llama"}, CLIP, {}),
    "llava-qwen2": ("LlavaConfig", NO_HEAD_DIM | {"model_type": "qwen2"}, CLIP, {}),
    # The whole config says tied, and the text_config does not: by default, they differ.
    "mistral3": ("Mistral3Config", TEXT | {"model_type": "mistral"}, PIXTRAL, {}),
    "mistral3-untied": (
        "Mistral3Config",
        TEXT | {"model_type": "mistral"},
        PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "ministral3": ("Mistral3Config", TEXT | MINISTRAL3 | {"model_type": "ministral3"}, PIXTRAL, {}),
    "qwen2-vl": ("Qwen2VLConfig", NO_HEAD_DIM | MROPE, OLD_TOWER, {}),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", NO_HEAD_DIM | MROPE, QWEN_TOWER, {}),
    "qwen3-vl": ("Qwen3VLConfig", TEXT | INTERLEAVED, DEEP, {}),
    "qwen3-vl-tied": ("Qwen3VLConfig", TEXT | INTERLEAVED, DEEP, {"tie_word_embeddings": True}),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", TEXT | MOE, DEEP, {}),
}


def make_model(case: str) -> Any:
    class_name, text, tower, others = CASES[case]
    torch.manual_seed(0)
    with quiet_transformers():
        config = getattr(transformers, class_name)(text_config=text, vision_config=tower, **others)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        scale, center = (0.25, 0.0) if parameter.dim() > 1 else (0.3, 0.5)
        parameter.data = center + scale * torch.randn(parameter.shape)
    return model.eval()


def save(model: Any, folder: Path) -> dict[str, Tensor]:
    """Write a model as transformers does; return its tensors."""
    with quiet_transformers():
        model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_folder(folder: Path, model: Any) -> None:
    """Compare logits, read in chunks through a paged cache, and what a served model generates."""
    source = ModelSource("folder", folder)
    config = ModelConfig.from_hf(read_config(source))
    prompts = make_prompts(97)
    sequences = PagedSequences(make_decoder(config, open_weights(source)), block_size=3)
    for name, logits in run_chunked(sequences, prompts).items():
        torch.testing.assert_close(logits, hugging_face_logits(model, prompts[name]), atol=2e-5, rtol=1e-4)
    llm = LLM(str(folder), device="cpu", num_blocks=64, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for prompt, output in zip(prompts.values(), llm.generate(list(prompts.values()), params), strict=True):
        assert output.outputs[0].token_ids == hugging_face_greedy(model, prompt, 6)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_folder_is_read_as_transformers_reads_text(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    tensors = save(model, tmp_path)
    assert any(own_name(name) is None for name in tensors), "no tensor is of the tower"
    check_folder(tmp_path, model)


NAMES = {
    "older": lambda name: name.replace("model.", "language_model.model.", 1).replace(
        "lm_head", "language_model.lm_head"
    ),
    "transformers-5": lambda name: name.replace("model.", "model.language_model.", 1),
    "plain": lambda name: name,
}


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("case", ["gemma3", "gemma4", "mistral3-untied", "qwen3-vl"])
def test_tensors_have_the_names_of_any_layout(case: str, layout: str, tmp_path: Path) -> None:
    model = make_model(case)
    tensors = {own_name(name) or f"visual.{name}": each for name, each in save(model, tmp_path).items()}
    renamed = {
        name if name.startswith("visual.") else NAMES[layout](name): each for name, each in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    check_folder(tmp_path, model)


def test_stacks_of_experts_may_be_transposed(tmp_path: Path) -> None:
    """Checkpoints of Qwen3-VL with experts have [E, hidden, 2 n], transformers writes [E, 2 n, hidden]."""
    model = make_model("qwen3-vl-moe")
    tensors = save(model, tmp_path)
    stacks = {name: each.mT.contiguous() for name, each in tensors.items() if ".experts." in name}
    assert len(stacks) == 6
    save_file(tensors | stacks, tmp_path / "model.safetensors")
    check_folder(tmp_path, model)
    weights = with_expert_names(open_weights(ModelSource("folder", tmp_path)))
    name = "model.layers.1.mlp.experts.4"
    up = tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"][4, 24:]
    part = weights.read(f"{name}.up_proj.weight", rows=slice(5, 9), dtype=torch.float32)
    assert torch.equal(part, up[5:9])


def test_what_old_files_leave_out_is_known(tmp_path: Path) -> None:
    """Gemma 3's files name no heads and no vocabulary, and those of Qwen 2.5 have no text_config."""
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
        | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
        | {"sliding_window": 1024, "eos_token_id": 1},
    }
    config = ModelConfig.from_hf(gemma)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {1, 106}
    flat = NO_HEAD_DIM | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"hidden_size": 1280}}
    config = ModelConfig.from_hf(flat)
    assert config.architecture == "Qwen2_5_VLForConditionalGeneration"
    assert config.has_qkv_bias
    assert config.ropes[0].rope_type == "default"


def test_every_row_of_the_table_names_a_family() -> None:
    for name, families in TEXT_PARTS.items():
        for model_type in families:
            text = (MOE if "moe" in model_type else {}) | TEXT | {"model_type": model_type}
            config = ModelConfig.from_hf({"architectures": [name], "text_config": text})
            assert config.architecture == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', which is not supported; supported: gemma3_text"),
        ({}, "model_type None"),
        ([], r"model_type \[\]"),
    ],
)
def test_other_text_models_are_refused_by_name(text: object, message: str) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(config)


def test_a_tensor_under_two_names_and_an_unknown_one_are_refused(tmp_path: Path) -> None:
    tensors = save(make_model("qwen3-vl"), tmp_path)
    again = {"language_model.lm_head.weight": torch.zeros(97, 64)}
    save_file(tensors | again, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has lm_head.weight twice, in language_model.lm_head.weight and"):
        LLM(str(tmp_path), device="cpu", num_blocks=8)
    save_file(tensors | {"model.vision_tower_2.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has model.vision_tower_2.weight"):
        LLM(str(tmp_path), device="cpu", num_blocks=8)


def test_text_models_quantised_by_a_tool_are_read(tmp_path: Path) -> None:
    """Towers stay as they are, of whatever types; a matrix in float8 has one scale, as Mistral writes it."""
    model = make_model("mistral3-untied")
    tensors = save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    stored = dict(tensors)
    for name, each in tensors.items():
        if "language_model" in name and name.endswith("_proj.weight"):
            scale = each.abs().max() / 448
            stored[name] = (each / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            stored[name.replace("weight", "activation_scale")] = torch.tensor(1.0)
            parameter = model.get_parameter(
                "model." + name.replace("model.model", "model").removeprefix("model.")
            )
            parameter.data = stored[name].float() * scale
    stored["vision_tower.steps"] = torch.zeros(1, dtype=torch.int64)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = ModelSource("folder", tmp_path)
    decoder = make_decoder(ModelConfig.from_hf(read_config(source)), open_weights(source))
    prompts = make_prompts(97)
    for name, logits in run_chunked(PagedSequences(decoder, block_size=3), prompts).items():
        torch.testing.assert_close(logits, hugging_face_logits(model, prompts[name]), atol=2e-5, rtol=1e-4)


def test_ties_of_a_wrong_type_are_refused() -> None:
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": "no"}
    with pytest.raises(FileFormatError, match="tie_word_embeddings must be true or false"):
        ModelConfig.from_hf(config | {"text_config": TEXT | {"model_type": "qwen3_vl_text"}})
