"""Phi-4-mini's layout, on disk: fused projections, tied embeddings, three quarters of a head turn, LongRoPE.

transformers takes the long factors for texts above original_max_position_embeddings, and computes the cache
anew where a text outgrows it. Octavo, like vLLM, takes them for all texts of an engine whose max_model_len is
above it: keys in the cache are shared and never computed anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import hugging_face_greedy, hugging_face_logits, hugging_face_model, quiet_transformers
from safetensors.torch import save_file

from octavo import LLM, SamplingParams

transformers = pytest.importorskip("transformers")
# The published config.json with smaller numbers; 12 of 16 dimensions turn.
CONFIG: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 96,
    "embd_pdrop": 0.0,
    "eos_token_id": 96,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 32,
    "pad_token_id": 96,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0, 1.5, 3.0, 8.0, 20.0, 31.0],
        "short_factor": [1.0, 1.0, 1.1, 1.3, 1.5, 2.0],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 2048,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 97,
}
SHORT, LONG = [5, 9, 2, 6, 44], [(7 * index) % 96 for index in range(50)]
NUM_TOKENS = 20


def make_model(**fields: Any) -> Any:
    """A random model, the same for any factors."""
    with quiet_transformers():
        # It writes into what it gets.
        copy = json.loads(json.dumps(CONFIG | fields))
        del copy["auto_map"]
        return hugging_face_model(transformers.Phi3Config(**copy))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi4-mini")
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: value.contiguous() for name, value in make_model().state_dict().items()}
    del tensors["lm_head.weight"]
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == ((6 + 2 * 2) * 16, 96)
    save_file(tensors, path / "model.safetensors")
    return path


def check(folder: Path, model: Any, prompt: list[int], **options: Any) -> None:
    """Compare greedy tokens, and log-probabilities of the prompt, with those of transformers."""
    llm = LLM(
        str(folder), **{"device": "cpu", "dtype": "float32", "num_blocks": 64, "block_size": 16} | options
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params)
    assert list(output.outputs[0].token_ids) == hugging_face_greedy(model, prompt, NUM_TOKENS)
    expected = hugging_face_logits(model, prompt).log_softmax(-1)
    found = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    wanted = [expected[place, token].item() for place, token in enumerate(prompt[1:])]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_texts_within_the_original_context(folder: Path) -> None:
    check(folder, make_model(), SHORT, max_model_len=32)


def test_texts_beyond_the_original_context(folder: Path) -> None:
    check(folder, make_model(), LONG)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_on_a_gpu(folder: Path) -> None:
    few = {"device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 128}
    check(folder, make_model(), SHORT, max_model_len=32, **few)
    check(folder, make_model(), LONG, **few)


def test_an_engine_for_long_texts_has_the_long_factors_for_all(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="octavo")
    factors = CONFIG["rope_scaling"]
    always_long = make_model(rope_scaling=factors | {"short_factor": factors["long_factor"]})
    check(folder, always_long, SHORT)
    assert "long factors, as max_model_len is 1024; texts of up to 32 tokens" in caplog.text
    # Which is not what transformers does.
    difference = hugging_face_logits(make_model(), SHORT) - hugging_face_logits(always_long, SHORT)
    assert difference.abs().max() > 1e-2


def test_what_does_not_turn_counts(folder: Path) -> None:
    """The equalities above would not notice a part that never matters."""
    whole = make_model(partial_rotary_factor=1.0, rope_scaling=None)
    part = make_model(rope_scaling=None)
    found = [hugging_face_logits(model, LONG) for model in (whole, part)]
    assert (found[0] - found[1]).abs().max() > 1e-2
    assert torch.equal(whole.model.embed_tokens.weight, part.model.embed_tokens.weight)
