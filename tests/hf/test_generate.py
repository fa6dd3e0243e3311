"""transformers' models say the same tokens on Octavo's operators as on their own attention."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import FAMILIES, count_calls, greedy, greedy_batch, make_model, make_prompts

import octavo.hf
import octavo.hf.attention_function

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
OPERATORS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each operator was called."""
    return count_calls(monkeypatch, octavo.hf.attention_function, OPERATORS)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_says_the_same_tokens(family: str, calls: dict[str, int]) -> None:
    model, _ = make_model(family)
    theirs = greedy(model)
    assert octavo.hf.attach(model) is model
    assert greedy(model) == theirs
    # Prefill and every step of decoding, in both layers; padding leaves a window after some steps.
    assert calls["flash_attn_with_kvcache"] + calls["flash_attn_func"] == 2 * 12
    assert calls["flash_attn_with_kvcache"] >= 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generate_with_a_static_cache_says_the_same_tokens(family: str, calls: dict[str, int]) -> None:
    model, _ = make_model(family)
    theirs = greedy(model)
    octavo.hf.attach(model)
    assert greedy(model, cache_implementation="static", disable_compile=True) == theirs
    assert calls["flash_attn_with_kvcache"] + calls["flash_attn_func"] == 2 * 12


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generate_batch_says_the_same_tokens(family: str, calls: dict[str, int]) -> None:
    model, _ = make_model(family)
    theirs = greedy(model)
    octavo.hf.attach(model)
    assert greedy_batch(model) == theirs
    assert calls["flash_attn_varlen_func"] >= 2 * 12
    assert calls["flash_attn_func"] == calls["flash_attn_with_kvcache"] == 0


def test_a_model_goes_back_to_its_own_attention(calls: dict[str, int]) -> None:
    model, peer = make_model("llama")
    octavo.hf.attach(model)
    model.set_attn_implementation(peer)
    greedy(model)
    assert not any(calls.values())


@torch.no_grad()
def test_padding_on_the_right_leaves_the_tokens_before_it_alone(calls: dict[str, int]) -> None:
    model, _ = make_model("llama")
    ids, mask = (x.flip(1) for x in make_prompts())
    theirs = model(ids, attention_mask=mask).logits
    octavo.hf.attach(model)
    ours = model(ids, attention_mask=mask).logits
    assert calls["flash_attn_with_kvcache"] == 2
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_padding_no_mask_is_read(calls: dict[str, int]) -> None:
    model, _ = make_model("llama")
    ids, mask = make_prompts()
    theirs = model(ids).logits
    octavo.hf.attach(model)
    torch.testing.assert_close(model(ids).logits, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        model(ids, attention_mask=torch.ones_like(mask)).logits, theirs, rtol=1e-4, atol=1e-4
    )
    assert calls == {"flash_attn_func": 4, "flash_attn_varlen_func": 0, "flash_attn_with_kvcache": 0}


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_encoder_sees_both_ways(side: str, calls: dict[str, int]) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=101
    )
    model: Any = BertModel(config, add_pooling_layer=False).eval()
    model.set_attn_implementation("sdpa")
    ids, mask = make_prompts() if side == "left" else (x.flip(1) for x in make_prompts())
    theirs = model(ids, attention_mask=mask).last_hidden_state
    octavo.hf.attach(model)
    ours = model(ids, attention_mask=mask).last_hidden_state
    assert calls["flash_attn_with_kvcache"] == 2
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-4)
