"""config.json in all its spellings, and what is refused."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from model_config_cases import LLAMA, of, read

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.kv import CacheLayer
from octavo.layers import RopeConfig
from octavo.models import num_parameters, parameter_shapes


def test_smollm2() -> None:
    config = read(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.layer_windows) == (64, 3, (None,) * 30)
    assert config.ropes == (RopeConfig(theta=100_000.0),)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", 1, frozenset({2}))
    assert config.attention_scale == 64**-0.5
    assert num_parameters(config) == 134_515_008
    assert config.cache_layers == (CacheLayer(3, 64),) * 30
    assert "lm_head.weight" not in parameter_shapes(config)


def test_old_and_new_spellings_say_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 4096}
    plain = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "torch_dtype")}
    spellings = [
        LLAMA | {"rope_scaling": scaling | {"rope_type": "llama3"}},
        LLAMA | {"rope_scaling": scaling | {"type": "llama3"}},
        plain
        | {"dtype": "bfloat16"}
        | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 100000.0}},
        LLAMA | {"rope_scaling": None, "rope_parameters": scaling | {"rope_type": "llama3"}},
    ]
    configs = [read(spelling) for spelling in spellings]
    assert len(set(configs)) == 1
    assert configs[0].ropes[0].original_max_positions == 4096


BOTH_ROPE_KEYS: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 3e5}}),
    ("MistralForCausalLM", {"rope_theta": 5e4, "rope_scaling": {}}),
    ("Qwen3ForCausalLM", {"rope_theta": 5e4, "rope_scaling": None}),
    ("Gemma3ForCausalLM", {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
]


@pytest.mark.parametrize(("architecture", "fields"), BOTH_ROPE_KEYS)
def test_rope_scaling_beside_rope_parameters_counts_as_in_transformers(
    architecture: str, fields: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    parameters: dict[str, Any] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    if architecture == "Gemma3ForCausalLM":
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default"}}
    config = of(architecture, sliding_window=None) | fields | {"rope_parameters": parameters}
    kind = architecture.replace("ForCausalLM", "TextConfig" if "Gemma3" in architecture else "Config")
    expected = getattr(transformers, kind)(**copy.deepcopy(config)).rope_parameters
    full = expected.get("full_attention", expected)
    rope = read(config | {"layer_types": ["full_attention"] * 6}).ropes[0]
    assert (rope.rope_type, rope.theta) == (full["rope_type"], full["rope_theta"])
    assert rope.factor == full["factor"]


def test_rope_parameters_of_a_family_with_local_frequencies_are_by_layer_type() -> None:
    """Transformers would drop the scaling without a word."""
    with pytest.raises(FileFormatError, match="rope_parameters must be one object for each of"):
        read(of("Gemma3ForCausalLM", rope_parameters={"rope_type": "linear", "factor": 8.0}))


def test_eos_may_be_one_id_several_or_none() -> None:
    assert read(LLAMA | {"eos_token_id": [2, 5, 2]}).eos_token_ids == {2, 5}
    assert read(of("Qwen2ForCausalLM", eos_token_id=None)).eos_token_ids == frozenset()
    for wrong in ("2", [2, "x"], -1, [True]):
        with pytest.raises(FileFormatError, match="eos_token_id"):
            read(LLAMA | {"eos_token_id": wrong})


def test_architecture_is_found_by_model_type_when_none_is_named() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "architectures"}
    assert read(config).architecture == "LlamaForCausalLM"


def test_mistral_slides_in_every_layer() -> None:
    assert read(of("MistralForCausalLM", sliding_window=512)).layer_windows == (512,) * 6
    assert read(of("MistralForCausalLM", sliding_window=None)).layer_windows == (None,) * 6
    assert read(of("MistralForCausalLM")).layer_windows == (4096,) * 6


def test_qwen_slides_only_when_told_and_after_max_window_layers() -> None:
    fields = {"sliding_window": 100, "max_window_layers": 4}
    assert read(of("Qwen2ForCausalLM", **fields, use_sliding_window=False)).layer_windows == (None,) * 6
    sliding = read(of("Qwen3ForCausalLM", **fields, use_sliding_window=True))
    assert sliding.layer_windows == (None, None, None, None, 100, 100)


def test_gemma_slides_by_pattern_or_by_layer_types() -> None:
    assert read(of("Gemma2ForCausalLM", sliding_window=8)).layer_windows == (8, None) * 3
    gemma3 = read(of("Gemma3ForCausalLM", sliding_window=8))
    assert gemma3.layer_windows == (8, 8, 8, 8, 8, None)
    assert (
        read(of("Gemma3ForCausalLM", sliding_window=8, sliding_window_pattern=2)).layer_windows
        == (8, None) * 3
    )
    types = ["full_attention", "sliding_attention"] * 3
    assert read(of("Gemma3ForCausalLM", sliding_window=8, layer_types=types)).layer_windows == (None, 8) * 3


def test_gemma3_keeps_local_frequencies_apart_in_both_spellings() -> None:
    old = of(
        "Gemma3ForCausalLM",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = of(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert read(old) == read(new)
    local, full = read(old).ropes
    assert (local.theta, local.rope_type, full.theta, full.rope_type) == (1e4, "default", 1e6, "linear")
    assert read(old).layer_ropes == (0, 0, 0, 0, 0, 1)


def test_gemma_defaults_that_its_files_leave_out() -> None:
    config = of("Gemma2ForCausalLM", hidden_activation=None)
    for name in ("head_dim", "tie_word_embeddings", "hidden_act"):
        del config[name]
    gemma = read(config)
    assert (gemma.head_dim, gemma.tie_word_embeddings, gemma.activation) == (256, True, "gelu_tanh")
    assert (gemma.attention_softcap, gemma.final_softcap) == (50.0, 30.0)
    assert gemma.attention_scale == 256**-0.5
    assert gemma.embedding_multiplier == 24.0


def test_text_only_gemma3_may_be_nested() -> None:
    text = of("Gemma3ForCausalLM", model_type="gemma3_text")
    nested = {"architectures": ["Gemma3ForCausalLM"], "text_config": text}
    assert read(nested) == read(text)
    with pytest.raises(UnsupportedModelError, match="text_config"):
        read({"architectures": ["Gemma3ForCausalLM"], "text_config": text | {"model_type": "gemma3"}})
    whole = read({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert whole == replace(read(text), architecture="Gemma3ForConditionalGeneration")


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(of("Qwen2ForCausalLM", max_position_embeddings=32768, rope_scaling=scaling))
    assert config.max_position_embeddings == 131072
    derived = read(
        of("Qwen2ForCausalLM", max_position_embeddings=32768)
        | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8192}}
    )
    assert derived.ropes[0].factor == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"long_factor": [1.0] * 3}, "long_factor must be a list of 32 numbers"),
        ({"short_factor": None}, "short_factor must be a list of 32 numbers"),
        ({"long_factor": [1.0] * 31 + [0.0]}, "long_factor: 31 must be a finite number above 0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be"),
    ],
)
def test_longrope_is_checked(fields: dict[str, Any], message: str) -> None:
    scaling = {"type": "su", "long_factor": [2.0] * 32, "short_factor": [1.0] * 32}
    scaling |= {"original_max_position_embeddings": 4096}
    rope = read(LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 16384}).ropes[0]
    assert (rope.rope_type, rope.factor, rope.original_max_positions) == ("longrope", 4.0, 4096)
    with pytest.raises(FileFormatError, match=message):
        read(LLAMA | {"rope_scaling": scaling | fields})


PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


def test_part_of_a_head_may_turn() -> None:
    assert read(PHI3).rotary_dim == read(PHI3).head_dim == 64
    assert read(PHI3 | {"partial_rotary_factor": 0.75}).rotary_dim == 48
    inner = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
    assert read(PHI3 | {"partial_rotary_factor": 0.75} | inner).rotary_dim == 32
    scaling = {"type": "longrope", "long_factor": [2.0] * 24, "short_factor": [1.0] * 24}
    long = {"rope_scaling": scaling, "original_max_position_embeddings": 1024}
    assert read(PHI3 | {"partial_rotary_factor": 0.75} | long).ropes[0].factors == (2.0,) * 24
    with pytest.raises(FileFormatError, match="long_factor must be a list of 32 numbers"):
        read(PHI3 | long)


@pytest.mark.parametrize("factor", [0.0, 1.5, 0.02, 0.8, 1e308, "0.75", True])
def test_the_part_that_turns_is_checked(factor: object) -> None:
    with pytest.raises(FileFormatError, match="partial_rotary_factor must be"):
        read(PHI3 | {"partial_rotary_factor": factor})
    with pytest.raises(FileFormatError, match="partial_rotary_factor must be"):
        read(PHI3 | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": factor}})


@pytest.mark.parametrize("layers", [[1] * 29, [1] * 29 + [2], "none"])
def test_layers_without_rotation_are_checked(layers: Any) -> None:
    smollm3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    config = read(smollm3 | {"no_rope_layers": [1, 0, 1] * 10})
    assert config.layer_ropes == (0, 1, 0) * 10
    assert config.ropes[1].factors == (float("inf"),) * 32
    with pytest.raises(FileFormatError, match="no_rope_layers must be a list of 0 or 1 for each layer"):
        read(smollm3 | {"no_rope_layers": layers})


def test_windows_by_letters() -> None:
    exaone4 = LLAMA | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "sliding_window": 8}
    config = read(exaone4 | {"sliding_window_pattern": "LLLG", "num_hidden_layers": 7})
    # The last layer sees all keys, whatever its letter says; layers that do are not rotated.
    assert config.layer_windows == (8, 8, 8, None, 8, 8, None)
    assert config.layer_ropes == (0, 0, 0, 1, 0, 0, 1)
    for wrong in ("", "LLX", 0, [3]):
        with pytest.raises(FileFormatError, match="sliding_window_pattern must be"):
            read(exaone4 | {"sliding_window_pattern": wrong})


def test_multipliers_are_read_by_families_that_have_them() -> None:
    factors = {
        "embedding_multiplier": 12,
        "residual_multiplier": 0.5,
        "logits_scaling": 8,
        "rms_norm_eps": 1e-5,
    }
    granite = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    config = read(granite | factors | {"attention_multiplier": 0.0625})
    assert (config.embedding_multiplier, config.logits_scaling, config.attention_scale) == (24.0, 8.0, 0.0625)
    assert config.rms_norm_eps == pytest.approx(4e-5)
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"):
        with pytest.raises(FileFormatError, match=f"{name} must be"):
            read(granite | {name: -1.0})
        with pytest.raises(UnsupportedModelError, match=name):
            read(LLAMA | {name: 2.0})


def test_explicit_frequency_factors() -> None:
    factors = [1.0 + index for index in range(32)]
    config = read(LLAMA | {"rope_scaling": {"rope_type": "factors", "factors": factors}})
    assert config.ropes[0].factors == tuple(factors)
    for wrong in (factors[:-1], "x", [*factors[:-1], 0.0], [*factors[:-1], None]):
        with pytest.raises(FileFormatError, match="factors"):
            read(LLAMA | {"rope_scaling": {"rope_type": "factors", "factors": wrong}})
