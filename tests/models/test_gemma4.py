"""What only Gemma 4 has: heads by layer, keys as values, layers that share a cache, layers' own inputs."""

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
    random_weights,
    run_chunked,
)
from safetensors.torch import save_file
from test_decoder_families import GEMMA4, GEMMA4_SHARED, GEMMA4_WIDE, config_json, make_prompts
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import FileFormatError, OctavoError, UnsupportedModelError, WeightsError
from octavo.kv.cache_layers import CacheLayer
from octavo.models import (
    ModelConfig,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
)
from octavo.models.source import ModelSource, open_weights, read_config
from octavo.models.storage import kept_storage

transformers = pytest.importorskip("transformers")

EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
# The sizes of real heads, in a small network.
REAL_HEADS = {"head_dim": 256, "global_head_dim": 512, "num_attention_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "e2b": GEMMA4_SHARED | REAL_HEADS,
    "e4b": GEMMA4 | REAL_HEADS | {"num_kv_shared_layers": 2, "tie_word_embeddings": True},
    "31b": GEMMA4_WIDE | REAL_HEADS,
    "26b-a4b": GEMMA4_WIDE | REAL_HEADS | EXPERTS,
}
# What the makers' config.json files say.
TEXT = {"architectures": ["Gemma4ForCausalLM"], "vocab_size": 262144, "final_logit_softcapping": 30.0}
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "e2b": (
        {"hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144, "num_attention_heads": 8}
        | {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        4.6e9,
        4.6e9,
    ),
    "31b": (
        {"hidden_size": 5376, "num_hidden_layers": 60, "intermediate_size": 21504, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "sliding_window": 1024},
        30.7e9,
        30.7e9,
    ),
    "26b-a4b": (
        {"hidden_size": 2816, "num_hidden_layers": 30, "intermediate_size": 2112, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "enable_moe_block": True}
        | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        25.2e9,
        3.8e9,
    ),
}


def make_model(fields: dict[str, Any]) -> Any:
    with quiet_transformers():
        return hugging_face_model(transformers.Gemma4TextConfig(**fields))


def config_of(**changed: Any) -> ModelConfig:
    return ModelConfig.from_hf(GEMMA4_SHARED | {"architectures": ["Gemma4ForCausalLM"]} | changed)


@pytest.mark.parametrize("case", CASES)
def test_heads_of_the_real_sizes_equal_transformers(case: str) -> None:
    model = make_model(CASES[case])
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            # Scores are not scaled, so a trained norm keeps those of large heads small.
            parameter.data /= 16
    config = ModelConfig.from_hf(config_json(model))
    sequences = PagedSequences(make_decoder(config, hugging_face_weights(model)), block_size=4)
    prompts = make_prompts(97)
    logits = run_chunked(sequences, prompts)
    for name, tokens in prompts.items():
        torch.testing.assert_close(logits[name], hugging_face_logits(model, tokens), atol=2e-5, rtol=0)
    continued = greedy(sequences, logits, 8)
    assert continued == {name: hugging_face_greedy(model, tokens, 8) for name, tokens in prompts.items()}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_shapes_have_the_published_numbers_of_parameters(case: str) -> None:
    fields, total, active = PUBLISHED[case]
    config = ModelConfig.from_hf(TEXT | fields)
    assert num_parameters(config) == pytest.approx(total, rel=0.02)
    assert num_active_parameters(config) == pytest.approx(active, rel=0.02)


def test_layers_that_share_a_cache_keep_nothing() -> None:
    config = config_of(num_kv_shared_layers=2)
    windowed, full = CacheLayer(1, 16, 6), CacheLayer(1, 32, None)
    assert config.cache_layers == (windowed, windowed, full, windowed)
    assert config.layer_caches == (0, 1, 2, 3, 3, 2)
    assert sum(layer.size for layer in config.cache_layers) == 3 * 16 + 32
    assert sum(layer.size for layer in config_of(num_kv_shared_layers=0).cache_layers) == 4 * 16 + 2 * 32


def test_values_that_are_keys_are_stored_in_the_order_of_checkpoints() -> None:
    """Trap: the projection's rows are in the order of the rotation, and the output's columns are not."""
    model = make_model(GEMMA4_WIDE)
    config = ModelConfig.from_hf(config_json(model))
    sequences = PagedSequences(make_decoder(config, hugging_face_weights(model)), block_size=4)
    tokens = make_prompts(97)["a"]
    sequences.step({"a": tokens})
    cached = model(torch.tensor([tokens]), use_cache=True).past_key_values
    for index in (0, 2, 5):
        blocks = sequences.blocks["a"][sequences.layout.group_of(index)]
        found = sequences.cache.layer(index).v[blocks].flatten(0, 1)[: len(tokens)]
        expected = cached.layers[index].values[0].transpose(0, 1)
        torch.testing.assert_close(found[-len(expected) :], expected, atol=1e-5, rtol=1e-5)


def test_unused_projections_of_sharing_layers_may_be_there() -> None:
    """Published checkpoints have them."""
    model = make_model(GEMMA4_SHARED)
    config = ModelConfig.from_hf(config_json(model))
    tensors: dict[str, Tensor] = hugging_face_weights(model).tensors
    names = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "k_norm.weight", "k_scale")
    unused = {f"model.layers.4.self_attn.{name}": torch.full((16, 64), torch.nan) for name in names}
    sequences = PagedSequences(make_decoder(config, DictWeights(tensors | unused)), block_size=4)
    tokens = make_prompts(97)["c"]
    torch.testing.assert_close(
        run_chunked(sequences, {"c": tokens})["c"], hugging_face_logits(model, tokens), atol=2e-5, rtol=0
    )
    own = {"model.layers.4.self_attn.q_proj.weight": torch.zeros(16, 64)}
    with pytest.raises(WeightsError, match=r"layers\.4\.self_attn\.q_proj\.weight is \[16, 64\]"):
        make_decoder(config, DictWeights(tensors | own))


def test_an_engine_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Prefix hits, branches of one prompt and long answers, over caches of two shapes."""
    model = make_model(GEMMA4_SHARED)
    with quiet_transformers():
        model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", num_blocks=64, block_size=4)
    prompt = make_prompts(97)["c"]
    prompts = [prompt, [*prompt[:30], 5, 6], prompt]
    greedily = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [hugging_face_greedy(model, each, 20) for each in prompts]
    for _ in range(2):
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, greedily)]
        assert found == expected
    assert llm.engine.stats().kv.prefix_hit_tokens > 0
    several = SamplingParams(n=3, temperature=1.0, seed=1, logprobs=0, max_tokens=12, ignore_eos=True)
    for completion in llm.generate([prompt], several)[0].outputs:
        rows = hugging_face_logits(model, prompt + list(completion.token_ids))[len(prompt) - 1 : -1]
        scored = rows.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])
        assert completion.cumulative_logprob == pytest.approx(float(scored.sum()), abs=1e-3)


@pytest.mark.parametrize("fields", [GEMMA4_WIDE | EXPERTS, GEMMA4_SHARED], ids=["experts", "shared"])
def test_checkpoints_quantised_by_a_tool_are_read(fields: dict[str, Any], tmp_path: Path) -> None:
    """llm-compressor writes each expert by itself and scales for rows, and leaves routers as they are."""
    own = fields | {"architectures": ["Gemma4ForCausalLM"]}
    exact = random_weights(ModelConfig.from_hf(own)).tensors
    stored: dict[str, Tensor] = {"model.vision_tower.patch_embedder.input_proj.weight": torch.zeros(4, 4)}
    for name, each in exact.items():
        written = name.replace("model.", "model.language_model.", 1).replace(".mlp.experts.", ".experts.")
        written = written.replace(".mlp.gate.weight", ".router.proj.weight").replace(".mlp.gate.", ".router.")
        stored[written] = each
        if name.endswith("_proj.weight"):
            scale = each.abs().amax(1, keepdim=True) / 448
            stored[written] = (each / scale).to(torch.float8_e4m3fn)
            stored[f"{written}_scale"] = scale
            exact[name] = stored[written].float() * scale
        if name.endswith("5.self_attn.q_proj.weight") and fields is GEMMA4_SHARED:
            # Of a layer that reads another layer's keys, these are there, too, and not needed.
            for kind in ("k", "v"):
                stored[written.replace("q_proj", f"{kind}_proj")] = stored[written].clone()
                stored[f"{written.replace('q_proj', f'{kind}_proj')}_scale"] = scale.clone()
    save_file(stored, tmp_path / "model.safetensors")
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*router.*", "re:.*vision_tower.*", "re:.*per_layer.*"],
    }
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    config |= {"text_config": fields | {"model_type": "gemma4_text"}, "quantization_config": quantization}
    config |= {"tie_word_embeddings": fields["tie_word_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = ModelSource("folder", tmp_path)
    prompts = make_prompts(97)
    for quantised in ("none", "auto"):
        read = ModelConfig.from_hf(read_config(source))
        decoder = make_decoder(read, open_weights(source), quantization=quantised)
        found = run_chunked(PagedSequences(decoder, block_size=4), prompts)
        plain = make_decoder(ModelConfig.from_hf(own), DictWeights(exact))
        for name, rows in run_chunked(PagedSequences(plain, block_size=4), prompts).items():
            torch.testing.assert_close(found[name], rows, atol=1e-4, rtol=1e-4)


def test_a_layer_without_values_of_its_own_may_stay_quantised() -> None:
    """Trap: a projection that a layer does not have is not one that stays in floats."""
    config = config_of(attention_k_eq_v=True)
    kept = kept_storage(parameter_shapes(config), {}, "fp8", device=torch.device("cpu"), dtype=torch.float32)
    assert set(kept) == {name for name in parameter_shapes(config) if name.endswith("_proj.weight")}


def test_files_may_say_the_heads_of_full_layers_in_two_ways() -> None:
    by_key = config_of(num_global_key_value_heads=2, attention_k_eq_v=True, num_key_value_heads=4)
    own = {"head_dim": 32, "num_key_value_heads": 2}
    by_layer = config_of(
        attention_k_eq_v=True, num_key_value_heads=4, per_layer_config={"2": own, "5": own}, global_head_dim=8
    )
    assert by_key == by_layer
    assert by_key.cache_layers[2] == CacheLayer(2, 32, None)
    # Their number has its own key only where keys are values.
    assert config_of(num_global_key_value_heads=2).cache_layers[2].num_kv_heads == 1
    assert config_of(per_layer_config={}).cache_layers[2].head_dim == 16


def test_what_files_leave_out_is_as_in_transformers() -> None:
    config = config_of(layer_types=None, rope_parameters=None, num_hidden_layers=8, num_kv_shared_layers=1)
    assert [window is None for window in config.layer_windows] == [False] * 5 + [True, False, True]
    sliding, full = config.ropes
    assert (sliding.theta, sliding.rope_type) == (10_000.0, "default")
    assert (full.theta, full.rope_type, full.proportion) == (1_000_000.0, "proportional", 0.25)
    # The last layer sees all keys, whatever the file says.
    assert config_of(layer_types=["full_attention"] + ["sliding_attention"] * 5).layer_windows[-1] is None


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_kv_shared_layers": 6}, FileFormatError, "num_kv_shared_layers must be an integer in"),
        ({"num_kv_shared_layers": 4}, FileFormatError, "num_kv_shared_layers must be fewer layers"),
        ({"vocab_size_per_layer_input": 96}, UnsupportedModelError, "vocab_size_per_layer_input = 96 below"),
        (
            {"use_bidirectional_attention": "all"},
            UnsupportedModelError,
            "use_bidirectional_attention = 'all'",
        ),
        (
            {"per_layer_config": {"6": {}}},
            FileFormatError,
            "per_layer_config must be objects by layers below 6",
        ),
        ({"per_layer_config": {"2": {"hidden_size": 3}}}, UnsupportedModelError, "hidden_size"),
        ({"per_layer_config": {"2": {"head_dim": 7}}}, FileFormatError, "head_dim must be even, got 7"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            FileFormatError,
            "must divide num_attention_heads",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            FileFormatError,
            "partial_rotary_factor must be a part of 1",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[OctavoError], message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(**changed)
