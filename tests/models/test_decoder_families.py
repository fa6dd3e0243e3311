"""Every family against transformers: same config dict, same weights, through the paged cache."""

import json
import random
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

from octavo.errors import WeightsError
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.parameters import with_own_projections

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Nothing here is a power of two or a multiple of a vector register.
ODD = (
    SMALL
    | {"vocab_size": 61, "hidden_size": 54, "intermediate_size": 37, "num_attention_heads": 9}
    | {
        "num_key_value_heads": 3,
        "head_dim": 6,
    }
)
GEMMA2 = SMALL | {"sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
GEMMA3 = GEMMA2 | {"layer_types": ["sliding_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}
SMOLLM3 = SMALL | {"pad_token_id": 0}
# It has no head_dim of its own.
PHI3 = {key: value for key, value in SMALL.items() if key != "head_dim"} | {"pad_token_id": 0}


# They have no head_dim of their own, either.
OLMO = {key: value for key, value in SMALL.items() if key != "head_dim"} | {"pad_token_id": 0}
OLMO3 = OLMO | {"num_hidden_layers": 5, "sliding_window": 6}
EXAONE4 = SMALL | {"sliding_window": 6, "num_hidden_layers": 5}
GRANITE = OLMO | {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "rms_norm_eps": 1e-3,
}
# Windows and full layers with heads of their own, each layer with an input of its own, ...
GEMMA4 = SMALL | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 20.0,
}
# ... keys as values and no input, ...
GEMMA4_WIDE = GEMMA4 | {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4_WIDE.items() if "per_layer_input" not in key}
# ... or layers that share a cache, as in E2B.
GEMMA4_SHARED = GEMMA4 | {
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
# Of 16 dimensions 12 turn.
PARTIAL = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}


def rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": parameters}


# Within the prompts' lengths, queries grow twice, and then again at 48.
GROWTH = {"llama_4_scaling_beta": 0.9, "original_max_position_embeddings": 16}
MINISTRAL3 = rope(YARN | GROWTH | {"mscale": 1.0, "mscale_all_dim": 1.0})
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "llama-odd-sizes-tied": ("LlamaConfig", ODD | {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head-gelu": ("LlamaConfig", SMALL | {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama-multi-query": ("LlamaConfig", SMALL | {"num_key_value_heads": 1}),
    "llama-linear": ("LlamaConfig", SMALL | rope({"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0})),
    "llama-llama3": ("LlamaConfig", SMALL | rope(LLAMA3)),
    "llama-yarn": ("LlamaConfig", SMALL | rope(YARN)),
    "llama-yarn-attention-factor": ("LlamaConfig", SMALL | rope(YARN | {"attention_factor": 1.7})),
    "llama-yarn-mscale": (
        "LlamaConfig",
        SMALL | rope(YARN | {"mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8.0}),
    ),
    # transformers takes 0 for "not given".
    "llama-yarn-zero-mscale-all-dim": (
        "LlamaConfig",
        SMALL | rope(YARN | {"mscale": 1.5, "mscale_all_dim": 0}),
    ),
    "llama-yarn-zeros": (
        "LlamaConfig",
        SMALL | rope(YARN | {"mscale": 0.0, "mscale_all_dim": 0.5, "beta_fast": 0, "beta_slow": 0}),
    ),
    "mistral-window": ("MistralConfig", SMALL | {"sliding_window": 5}),
    "mistral-no-window": ("MistralConfig", SMALL | {"sliding_window": None}),
    "ministral3": ("Ministral3Config", SMALL | MINISTRAL3),
    "ministral3-window-tied": (
        "Ministral3Config",
        SMALL | MINISTRAL3 | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    "ministral3-default-rope": (
        "Ministral3Config",
        SMALL | rope({"rope_type": "default", "rope_theta": 100.0} | GROWTH),
    ),
    "phi3": ("Phi3Config", PHI3),
    "phi3-partial-tied": ("Phi3Config", PHI3 | PARTIAL),
    "phi3-window": ("Phi3Config", PHI3 | {"sliding_window": 5, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3Config", SMOLLM3 | {"no_rope_layers": [1, 0, 1]}),
    "smollm3-interval-tied": (
        "SmolLM3Config",
        SMOLLM3 | {"no_rope_layer_interval": 2, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "smollm3-window": (
        "SmolLM3Config",
        SMOLLM3 | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmo2": ("Olmo2Config", OLMO),
    "olmo2-bias-tied": (
        "Olmo2Config",
        OLMO | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "olmo3": ("Olmo3Config", OLMO3),
    "olmo3-yarn": (
        "Olmo3Config",
        OLMO3
        | rope(
            {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        ),
    ),
    "exaone4": ("Exaone4Config", EXAONE4),
    "exaone4-full": (
        "Exaone4Config",
        EXAONE4 | {"sliding_window": None, "layer_types": ["full_attention"] * 5, "num_key_value_heads": 1},
    ),
    "granite": ("GraniteConfig", GRANITE),
    "granite-biases-tied": (
        "GraniteConfig",
        GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "seed-oss": ("SeedOssConfig", SMALL),
    "seed-oss-biases": (
        "SeedOssConfig",
        SMALL | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen2-window-tied": (
        "Qwen2Config",
        SMALL
        | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 24}),
    "qwen3-bias-odd": ("Qwen3Config", ODD | {"attention_bias": True, "head_dim": 10}),
    "gemma2": ("Gemma2Config", GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-tied-bias": ("Gemma2Config", GEMMA2 | {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": ("Gemma3TextConfig", GEMMA3 | {"tie_word_embeddings": True}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-keys-as-values": ("Gemma4TextConfig", GEMMA4_WIDE),
    "gemma4-keys-as-values-bias": (
        "Gemma4TextConfig",
        GEMMA4_WIDE | {"attention_bias": True, "final_logit_softcapping": None, "tie_word_embeddings": True},
    ),
    "gemma4-shared": ("Gemma4TextConfig", GEMMA4_SHARED),
    "gemma4-shared-keys-as-values": (
        "Gemma4TextConfig",
        GEMMA4_SHARED | {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_kv_shared_layers": 2},
    ),
    "gemma4-ropes": (
        "Gemma4TextConfig",
        GEMMA4
        | rope(
            {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.6,
                    "factor": 3.0,
                },
                "sliding_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            }
        ),
    ),
    # Equal frequencies of heads of two sizes.
    "gemma4-equal-ropes": (
        "Gemma4TextConfig",
        GEMMA4
        | rope(
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        ),
    ),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", GEMMA4_UNIFIED),
    "gemma3-scaled-softcap": (
        "Gemma3TextConfig",
        GEMMA3
        | {"final_logit_softcapping": 4.0}
        | rope(
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        ),
    ),
}


def make_config(case: str) -> Any:
    class_name, fields = CASES[case]
    with quiet_transformers():
        return getattr(transformers, class_name)(**fields)


def config_json(model: Any) -> dict[str, Any]:
    """What save_pretrained would write."""
    return json.loads(json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]}))


def make_prompts(vocab_size: int) -> dict[str, list[int]]:
    pick = random.Random(1)
    return {
        name: [pick.randrange(vocab_size) for _ in range(length)]
        for name, length in (("a", 13), ("b", 1), ("c", 41), ("d", 7))
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str) -> None:
    model = hugging_face_model(make_config(case))
    config = ModelConfig.from_hf(config_json(model))
    decoder = make_decoder(config, hugging_face_weights(model))
    prompts = make_prompts(config.vocab_size)
    sequences = PagedSequences(decoder, block_size=3)

    logits = run_chunked(sequences, prompts)

    for name, tokens in prompts.items():
        expected = hugging_face_logits(model, tokens)
        torch.testing.assert_close(logits[name], expected, atol=1e-4, rtol=1e-4)
    continued = greedy(sequences, logits, 12)
    for name, tokens in prompts.items():
        assert continued[name] == hugging_face_greedy(model, tokens, 12)


@pytest.mark.parametrize("case", CASES)
def test_parameter_shapes_are_those_of_transformers(case: str) -> None:
    model = hugging_face_model(make_config(case))
    config = ModelConfig.from_hf(config_json(model))
    weights = with_own_projections(hugging_face_weights(model), config)
    assert parameter_shapes(config) == {name: tuple(weights.shape(name)) for name in weights.names()}


def test_a_projection_that_is_fused_and_by_itself_is_refused() -> None:
    model = hugging_face_model(make_config("phi3"))
    own = "model.layers.1.self_attn.q_proj.weight"
    weights = DictWeights(hugging_face_weights(model).tensors | {own: torch.zeros(4, 4)})
    with pytest.raises(WeightsError, match=f"has {own} twice, in {own} and in .*qkv_proj"):
        make_decoder(ModelConfig.from_hf(config_json(model)), weights)


def test_dynamic_scaling_equals_transformers_at_the_length_it_is_computed_for() -> None:
    fields = SMALL | {"max_position_embeddings": 16}
    fields |= rope({"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0})
    with quiet_transformers():
        model = hugging_face_model(transformers.LlamaConfig(**fields))
    config = ModelConfig.from_hf(config_json(model))
    tokens = make_prompts(config.vocab_size)["c"]
    long = make_decoder(config, hugging_face_weights(model), max_model_len=len(tokens))
    short = make_decoder(config, hugging_face_weights(model), max_model_len=16)

    expected_short = hugging_face_logits(model, tokens[:16])
    expected_long = hugging_face_logits(model, tokens)

    got_short = run_chunked(PagedSequences(short, block_size=4), {"a": tokens[:16]})["a"]
    got_long = run_chunked(PagedSequences(long, block_size=4), {"a": tokens})["a"]
    torch.testing.assert_close(got_short, expected_short, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_long, expected_long, atol=1e-4, rtol=1e-4)
    assert (expected_long[:16] - expected_short).abs().max() > 1e-2


@pytest.mark.parametrize("part", [{}, PARTIAL], ids=["phi-3", "phi-4-mini"])
def test_longrope_equals_transformers_at_the_length_it_is_computed_for(part: dict[str, Any]) -> None:
    number = 6 if part else 8
    scaling = {key: value[:number] if isinstance(value, list) else value for key, value in LONGROPE.items()}
    with quiet_transformers():
        fields = PHI3 | part | rope(scaling) | {"original_max_position_embeddings": 16}
        model = hugging_face_model(transformers.Phi3Config(**fields))
    config = ModelConfig.from_hf(config_json(model))
    tokens = make_prompts(config.vocab_size)["c"]
    expected_short, expected_long = (hugging_face_logits(model, tokens[:length]) for length in (16, None))
    short = make_decoder(config, hugging_face_weights(model), max_model_len=16)
    got_short = run_chunked(PagedSequences(short, block_size=4), {"a": tokens[:16]})
    torch.testing.assert_close(got_short["a"], expected_short, atol=1e-4, rtol=1e-4)
    sequences = PagedSequences(make_decoder(config, hugging_face_weights(model)), block_size=4)
    got_long = run_chunked(sequences, {"a": tokens})
    torch.testing.assert_close(got_long["a"], expected_long, atol=1e-4, rtol=1e-4)
    assert greedy(sequences, got_long, 12)["a"] == hugging_face_greedy(model, tokens, 12)
    assert (expected_long[:16] - expected_short).abs().max() > 1e-2


def test_windows_softcaps_and_growth_of_these_cases_do_change() -> None:
    """The equalities above would not notice an ignored window or softcap that changes nothing."""
    for case, neutral in (
        ("mistral-window", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("ministral3", rope(YARN)),
    ):
        model = hugging_face_model(make_config(case))
        prompts = make_prompts(97)
        with_it, without = (
            run_chunked(
                PagedSequences(make_decoder(config, hugging_face_weights(model)), block_size=3), prompts
            )
            for config in (
                ModelConfig.from_hf(config_json(model)),
                ModelConfig.from_hf(config_json(model) | neutral),
            )
        )
        assert (with_it["c"] - without["c"]).abs().max() > 1e-2
