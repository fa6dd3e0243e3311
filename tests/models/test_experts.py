"""Mixtures of experts against transformers, in every layout of checkpoints; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import (
    DictWeights,
    PagedSequences,
    greedy,
    hugging_face_greedy,
    hugging_face_logits,
    hugging_face_model,
    hugging_face_weights,
    make_decoder,
    quiet_transformers,
    run_chunked,
)
from test_decoder_families import GEMMA4_SHARED, GEMMA4_WIDE, SMALL, config_json, make_prompts

from octavo import LLM, SamplingParams
from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.gemm.stacked_experts import StackedExperts
from octavo.models import ModelConfig, builder, num_active_parameters, num_parameters, parameter_shapes
from octavo.models.experts.names import with_expert_names
from octavo.models.formats.safetensors import SafetensorsWeights

transformers = pytest.importorskip("transformers")

QWEN3: dict[str, Any] = SMALL | {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
}
BUFFERS = ("e_score_correction_bias", "layer_scalar")
NO_HEAD_DIM: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "head_dim"}
QWEN2: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
}
GLM4: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
ERNIE: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
}
GRANITE: dict[str, Any] = NO_HEAD_DIM | {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "rms_norm_eps": 1e-3,
}
MAMBA: dict[str, Any] = {
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 2,
    "mamba_expand": 1,
    "mamba_d_head": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3MoeConfig",
        SMALL
        | {"moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3-moe-dense-layers": (
        "Qwen3MoeConfig",
        SMALL
        | {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 5}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "qwen3-moe-window": (
        "Qwen3MoeConfig",
        SMALL
        | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        | {"use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3-moe-without-experts-by-list": ("Qwen3MoeConfig", QWEN3 | {"mlp_only_layers": [0, 1, 2]}),
    "qwen3-moe-without-experts-by-step": ("Qwen3MoeConfig", QWEN3 | {"decoder_sparse_step": 4}),
    "qwen3-moe-without-experts-by-number": ("Qwen3MoeConfig", QWEN3 | {"num_experts": 0}),
    "qwen2-moe": ("Qwen2MoeConfig", NO_HEAD_DIM | QWEN2),
    "qwen2-moe-dense-layers-without-bias": (
        "Qwen2MoeConfig",
        NO_HEAD_DIM | QWEN2 | {"decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "glm4-moe": ("Glm4MoeConfig", SMALL | GLM4 | {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "glm4-moe-groups": (
        "Glm4MoeConfig",
        SMALL
        | GLM4
        | {"n_group": 4, "topk_group": 2, "attention_bias": True, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        SMALL
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8}
        # Some versions of transformers do not know rotary_dim.
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "ernie-moe": ("Ernie4_5_MoeConfig", NO_HEAD_DIM | ERNIE),
    "ernie-moe-interval": (
        "Ernie4_5_MoeConfig",
        NO_HEAD_DIM
        | ERNIE
        | {"num_hidden_layers": 5, "moe_layer_start_index": 2, "moe_layer_end_index": 3}
        | {"moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": True},
    ),
    "hy-v3": (
        "HYV3Config",
        SMALL
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        GEMMA4_WIDE
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma4-inputs-shared": (
        "Gemma4TextConfig",
        GEMMA4_SHARED
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 1, "moe_intermediate_size": 40},
    ),
    "granite-moe": ("GraniteMoeConfig", GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        GRANITE
        | {"num_local_experts": 4, "num_experts_per_tok": 3, "shared_intermediate_size": 40}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        GRANITE
        | MAMBA
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope"},
    ),
    "granite-4-dense": (
        "GraniteMoeHybridConfig",
        GRANITE | MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 40},
    ),
    "mixtral": ("MixtralConfig", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "MixtralConfig",
        SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "olmoe": ("OlmoeConfig", SMALL | {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-one-expert": ("OlmoeConfig", SMALL | {"num_experts": 3, "num_experts_per_tok": 1}),
}


def make_model(case: str) -> Any:
    class_name, fields = CASES[case]
    # OLMoE has no head_dim of its own.
    fields = {key: value for key, value in fields.items() if class_name != "OlmoeConfig" or key != "head_dim"}
    with quiet_transformers():
        return hugging_face_model(getattr(transformers, class_name)(**fields))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str) -> None:
    model = make_model(case)
    config = ModelConfig.from_hf(config_json(model))
    decoder = make_decoder(config, hugging_face_weights(model))
    prompts = make_prompts(config.vocab_size)
    sequences = PagedSequences(decoder, block_size=3)
    logits = run_chunked(sequences, prompts)
    for name, tokens in prompts.items():
        torch.testing.assert_close(logits[name], hugging_face_logits(model, tokens), atol=2e-4, rtol=1e-4)
    continued = greedy(sequences, logits, 6)
    for name, tokens in prompts.items():
        assert continued[name] == hugging_face_greedy(model, tokens, 6)


@pytest.mark.parametrize(
    "case",
    ["qwen3-moe", "mixtral", "olmoe", "qwen2-moe", "glm4-moe-groups", "minimax-m2", "ernie-moe", "hy-v3"]
    + [case for case in CASES if case.startswith("granite")],
)
def test_a_saved_folder_generates_what_transformers_does(case: str, tmp_path: Path) -> None:
    """Files as they are on the hub: a tensor for each expert, or Granite's stacks, under their own names."""
    model = make_model(case)
    with quiet_transformers():
        model.save_pretrained(tmp_path)
    own = ".input_linear." if case.startswith("granite") else ".experts.2."
    assert any(own in name for name in SafetensorsWeights(tmp_path).names())
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), device="cpu", num_blocks=64, block_size=4)
    prompts = list(make_prompts(97).values())
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == hugging_face_greedy(model, prompt, 6)


@pytest.mark.parametrize("case", CASES)
def test_parameter_shapes_are_those_of_transformers(case: str) -> None:
    model = make_model(case)
    config = ModelConfig.from_hf(config_json(model))
    weights = with_expert_names(hugging_face_weights(model))
    assert {name: weights.shape(name) for name in weights.names()} == parameter_shapes(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    biases = [each for name, each in model.named_buffers() if name.endswith(BUFFERS)]
    assert num_parameters(config) == sum(each.numel() for each in (*model.parameters(), *biases))
    if config.experts is None:
        assert num_active_parameters(config) == num_parameters(config)
    else:
        assert num_active_parameters(config) < num_parameters(config) - embedding


def test_forks_and_prefixes_change_no_token(tmp_path: Path) -> None:
    fields = {key: value for key, value in CASES["qwen3-moe"][1].items() if key != "max_position_embeddings"}
    fields |= {"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {"load_format": "dummy", "device": "cpu", "num_blocks": 64, "block_size": 4}
    prefix = [(5 * i) % 97 for i in range(40)]
    prompts = [[*prefix, 3, 4], [*prefix, 3, 5], [7], [*prefix]]
    params = SamplingParams(temperature=0, n=3, max_tokens=8, ignore_eos=True)
    found = []
    for caches in (True, False):
        llm = LLM(str(tmp_path), enable_prefix_caching=caches, **options)
        llm.generate(prompts[0], params)
        outputs = llm.generate(prompts, params)
        assert (sum(output.num_cached_tokens for output in outputs) > 0) == caches
        found.append([[c.token_ids for c in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert all(len({tuple(tokens) for tokens in forks}) == 1 for forks in found[0])


def test_parts_of_stacked_experts() -> None:
    stored = hugging_face_weights(make_model("qwen3-moe"))
    weights = with_expert_names(stored)
    stack = stored.tensors["model.layers.1.mlp.experts.gate_up_proj"]
    prefix = "model.layers.1.mlp.experts.2"
    up = weights.read(f"{prefix}.up_proj.weight", rows=slice(8, 20), dtype=torch.float32)
    assert torch.equal(up, stack[2, 48:60])
    stack = stored.tensors["model.layers.1.mlp.experts.down_proj"]
    down = weights.read(f"{prefix}.down_proj.weight", columns=slice(8, 20), dtype=torch.float32)
    assert torch.equal(down, stack[2, :, 8:20])
    assert down.is_contiguous()


def test_routers_of_float32_stay_so() -> None:
    """transformers keeps Ernie's in float32 in a model of bfloat16; rounded, they choose other experts."""
    for case, dtype in (("ernie-moe", torch.float32), ("glm4-moe", torch.bfloat16)):
        model = make_model(case)
        weights = hugging_face_weights(model)
        decoder = make_decoder(ModelConfig.from_hf(config_json(model)), weights, dtype=torch.bfloat16)
        router = decoder.layers[1].feed_forward.router
        assert router.weight.dtype == dtype
        assert torch.equal(router.weight, weights.tensors["model.layers.1.mlp.gate.weight"].to(dtype))
        x = torch.randn(5, 64).bfloat16()
        assert torch.equal(router(x).weights, router(x.float()).weights)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_stacks_for_a_gpu_hold_what_lists_do(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mixtral")
    config = ModelConfig.from_hf(config_json(model))
    tensors = hugging_face_weights(model)
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    decoder = make_decoder(config, tensors, quantization=quantization)
    experts = decoder.layers[1].feed_forward.experts
    assert isinstance(experts, StackedExperts)
    for weight, name in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        stored = tensors.tensors[f"model.layers.1.mlp.experts.{name}"]
        assert (weight.scales is None) == (quantization == "none")
        error = (weight.dequantise() - stored).abs()
        assert bool((error <= (0.0 if quantization == "none" else 2**-4) * stored.abs() + 1e-3).all())
        assert weight.form != experts.form


def test_experts_that_do_not_fit_are_named() -> None:
    model = make_model("qwen3-moe")
    config = ModelConfig.from_hf(config_json(model))
    tensors = hugging_face_weights(model).tensors
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for stack, message in (
        (tensors[name][:6], "lacks model.layers.0.mlp.experts.6.gate_proj.weight"),
        (tensors[name][:, :78], "is \\[39, 64\\], expected \\[40, 64\\]"),
        (tensors[name][:, :77], "is \\[77, 64\\], expected \\[40, 64\\]"),
        (tensors[name][0], "lacks model.layers.0.mlp.experts.0.gate_proj.weight"),
    ):
        with pytest.raises(WeightsError, match=message):
            make_decoder(config, DictWeights(tensors | {name: stack}))


def test_an_expert_in_two_places_is_refused() -> None:
    """Trap: which of them was read depended on the order of a set."""
    model = make_model("mixtral")
    tensors = hugging_face_weights(model).tensors
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    for also, where in (
        (name, f"{name} and in model.layers.1.mlp.experts.down_proj"),
        ("model.layers.1.block_sparse_moe.experts.2.w2.weight", "experts.2.w2.weight and in"),
    ):
        weights = DictWeights(tensors | {also: torch.zeros(4, 4)})
        with pytest.raises(WeightsError, match=f"has {name} twice, in .*{where}"):
            make_decoder(ModelConfig.from_hf(config_json(model)), weights)


BASE = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
BASE |= {"moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be an integer in \[1, 8\], got 9"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts": -1}, "num_experts must be"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"moe_intermediate_size": "16"}, "moe_intermediate_size must be"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers below 3"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be"),
    ],
)
def test_malformed_experts_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        ModelConfig.from_hf(BASE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "keys that are compressed into one latent row"),
        ({"architectures": ["Llama4ForCausalLM"]}, "attention within chunks"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size = 32 is not supported"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "num_experts = 8 is not supported"),
    ],
)
def test_other_mixtures_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(BASE | change)


def test_layers_that_predict_a_token_further_are_left_alone() -> None:
    model = make_model("glm4-moe")
    tensors = hugging_face_weights(model).tensors
    drafts = {
        name.replace("layers.2.", "layers.3."): each for name, each in tensors.items() if "layers.2." in name
    }
    drafts["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    drafts["model.mtp_block.0.mlp.gate_proj.weight"] = torch.zeros(64, 64)
    fields = config_json(model)
    make_decoder(ModelConfig.from_hf(fields), DictWeights(tensors | drafts))
    none = {"num_mtp_layers": 0, "num_nextn_predict_layers": 0}
    with pytest.raises(WeightsError, match=r"has model\.layers\.3\."):
        make_decoder(ModelConfig.from_hf(fields | none), DictWeights(tensors | drafts))


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("glm4-moe", {"n_group": 3}, "n_group must be a number of equal groups"),
        ("glm4-moe", {"n_group": 8}, "n_group must be a number of equal groups of at least two"),
        ("glm4-moe", {"n_group": 2, "topk_group": 3}, "topk_group must be"),
        ("hy-v3", {"mlp_layer_types": ["sparse", "both", "dense"]}, "mlp_layer_types must be a list"),
        ("hy-v3", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must be a list"),
        ("ernie-moe", {"moe_layer_interval": 0}, "moe_layer_interval must be"),
        ("minimax-m2", {"rotary_dim": 18}, "rotary_dim must be"),
    ],
)
def test_fields_of_experts_are_checked(case: str, fields: dict[str, Any], message: str) -> None:
    config = config_json(make_model(case))
    config.pop("rope_parameters", None)
    with pytest.raises(FileFormatError, match=message):
        ModelConfig.from_hf(config | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["attention", "mamba", "attention"]}, "layer type 'mamba' is not supported"),
        ({"layer_types": ["full_attention", "linear_attention", "attention"]}, "'linear_attention'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not supported"),
    ],
)
def test_other_layers_of_granite_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(config_json(make_model("granite-4")) | fields)


def test_biases_of_ernie_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_bias = True is not supported"):
        ModelConfig.from_hf(config_json(make_model("ernie-moe")) | {"use_bias": True})
