"""Building a decoder: what is refused, what is kept, what each option does."""

from typing import Any

import pytest
import torch
from decoder_harness import (
    DictWeights,
    PagedSequences,
    greedy,
    make_decoder,
    random_weights,
    run_chunked,
)

from octavo.attention import AttentionMetadata, KVCache
from octavo.errors import ConfigError, InvalidArgumentError, WeightsError
from octavo.gemm.cpu.mkl import MklLinear
from octavo.gemm.linear import PlainLinear
from octavo.models import ModelConfig, parameter_shapes
from octavo.models.building import packing
from octavo.models.one_thread import one_thread

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPTS = {"a": list(range(11)), "b": [3, 1, 4, 1, 5]}


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(TINY | fields)


def logits_of(config: ModelConfig, weights: DictWeights, **options: Any) -> dict[str, torch.Tensor]:
    return run_chunked(PagedSequences(make_decoder(config, weights, **options), block_size=4), PROMPTS)


def test_missing_tensors_are_named_with_the_nearest() -> None:
    config, weights = config_of(), random_weights(config_of())
    weights.tensors["model.layers.0.self_attn.q_prj.weight"] = weights.tensors.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.weight.*q_prj"):
        make_decoder(config, weights)


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(WeightsError, match=r"lacks .* and 15 more"):
        make_decoder(config_of(), DictWeights({}))


def test_unexpected_tensors_are_refused() -> None:
    weights = random_weights(config_of())
    weights.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    with pytest.raises(WeightsError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias.*no use for"):
        make_decoder(config_of(), weights)


def test_wrong_shapes_are_refused() -> None:
    weights = random_weights(config_of())
    weights.tensors["model.norm.weight"] = torch.ones(31)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \[31\], expected \[32\]"):
        make_decoder(config_of(), weights)


def test_harmless_extras_are_ignored() -> None:
    weights = random_weights(config_of())
    expected = logits_of(config_of(), weights)
    weights.tensors["lm_head.weight"] = weights.tensors["model.embed_tokens.weight"]
    weights.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights.tensors["model.rotary_emb.inv_freq"] = torch.ones(4)
    assert logits_of(config_of(), weights)["a"].equal(expected["a"])


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 1}, "the KV cache is of 1 layers with"),
        ({"num_kv_heads": 3}, "3 kv heads x 8, the network of 2 layers with"),
        ({"head_dim": 16}, "kv heads x 16, the network of 2 layers with"),
        ({}, "got 2 input_ids for 3 positions"),
    ],
)
def test_a_step_that_does_not_fit_the_network_is_refused(
    change: dict[str, int], message: str, quantization: str
) -> None:
    """Trap: C would read and write beyond the cache, or the rows of the step."""
    config = config_of()
    decoder = make_decoder(config, random_weights(config), quantization=quantization)
    sizes = {"num_layers": 2, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    cache = KVCache.allocate(num_blocks=4, block_size=4, **sizes | change)
    step = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32),
        positions=torch.arange(3, dtype=torch.int32),
        slot_mapping=torch.arange(3),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        max_query_len=3,
        max_seq_len=3,
    )
    input_ids = torch.arange(3 if change else 2)
    with pytest.raises(InvalidArgumentError, match=message), torch.inference_mode():
        decoder.forward(input_ids, cache, step)


def test_loads_that_overlap_leave_the_number_of_threads() -> None:
    """Trap: the second one took the first one's single thread for what was there before."""
    before = torch.get_num_threads()
    first, second = one_thread, one_thread
    first.__enter__()
    second.__enter__()
    assert torch.get_num_threads() == 1
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == before


def test_progress_counts_every_tensor_once() -> None:
    config, calls = config_of(tie_word_embeddings=False), []
    make_decoder(config, random_weights(config), progress=lambda done, total: calls.append((done, total)))
    num_tensors = len(parameter_shapes(config))
    assert calls == [(done, num_tensors) for done in range(1, num_tensors + 1)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_bfloat16_is_near_float32(architecture: str) -> None:
    config = config_of(architectures=[architecture], head_dim=8)
    weights = random_weights(config)
    exact = logits_of(config, weights)["a"]
    decoder = make_decoder(config, weights, dtype=torch.bfloat16)
    sequences = PagedSequences(decoder, block_size=4)
    object.__setattr__(sequences.cache, "data", sequences.cache.data.bfloat16())
    got = run_chunked(sequences, PROMPTS)["a"]
    assert got.dtype == torch.float32
    assert 0 < (got - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_int8_is_near_float32(tied: bool) -> None:
    config = config_of(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    weights = random_weights(config)
    exact, got = logits_of(config, weights), logits_of(config, weights, quantization="int8")
    assert 0 < (got["a"] - exact["a"]).norm() / exact["a"].norm() < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_products_in_bfloat16_are_near_float32(tied: bool) -> None:
    config = config_of(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    weights = random_weights(config)
    exact, got = logits_of(config, weights)["a"], logits_of(config, weights, quantization="bf16")["a"]
    assert got.dtype == torch.float32
    error = (got - exact).abs().max()
    assert 0 < error < 0.03 * exact.abs().max()
    # Where the best token is better than the next one by more than twice that, it stays the best.
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * error
    assert clear.any()
    assert got.argmax(-1)[clear].equal(exact.argmax(-1)[clear])


@pytest.mark.parametrize("tied", [True, False])
def test_a_bfloat16_checkpoint_is_multiplied_exactly_without_units(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    config = config_of(tie_word_embeddings=tied, attention_bias=True)
    weights = random_weights(config)
    weights.tensors = {name: tensor.bfloat16().float() for name, tensor in weights.tensors.items()}
    exact, got = logits_of(config, weights), logits_of(config, weights, quantization="bf16")
    torch.testing.assert_close(got["a"], exact["a"], atol=1e-4, rtol=1e-4)


def test_a_tied_head_in_bfloat16_is_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = config_of(tie_word_embeddings=True), []

    def make(weight: torch.Tensor, *rest: object, **options: object) -> PlainLinear:
        made.append(weight)
        return PlainLinear(weight, None)

    monkeypatch.setattr(packing, "make_linear", make)
    decoder = make_decoder(config, random_weights(config), quantization="bf16")
    assert {weight.dtype for weight in made} == {torch.bfloat16}
    assert made[-1] is decoder.embed_tokens._weight
    assert decoder.dtype == torch.float32


def test_int8_batched_equals_int8_alone() -> None:
    decoder = make_decoder(config_of(), random_weights(config_of()), quantization="int8")
    together = PagedSequences(decoder, block_size=4)
    continued = greedy(together, run_chunked(together, PROMPTS), 8)
    for name, prompt in PROMPTS.items():
        alone = PagedSequences(decoder, block_size=4)
        assert greedy(alone, alone.step({name: prompt}), 8)[name] == continued[name]


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_rounding_in_half_precision_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_decoder(config_of(), random_weights(config_of()), quantization=name, dtype=torch.bfloat16)


def test_attention_implementations_agree_and_unknown_ones_are_refused() -> None:
    weights = random_weights(config_of())
    reference = logits_of(config_of(), weights, attention_impl="reference")
    torch.testing.assert_close(logits_of(config_of(), weights), reference, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="cuneiform"):
        logits_of(config_of(), weights, attention_impl="cuneiform")


def test_weights_are_copied_so_that_their_source_can_be_closed() -> None:
    config = config_of(tie_word_embeddings=False)
    weights = random_weights(config)
    expected = logits_of(config, weights)["a"]
    decoder = make_decoder(config, weights)
    for tensor in weights.tensors.values():
        tensor.fill_(float("nan"))
    assert run_chunked(PagedSequences(decoder, block_size=4), PROMPTS)["a"].equal(expected)


@pytest.mark.parametrize("gemvs", [("qkv", "o"), ("qkv",), ("o",)])
def test_attention_knows_whether_it_is_between_gemvs(
    gemvs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    widths = {"qkv": 64, "o": 32}
    monkeypatch.setattr(
        MklLinear,
        "has_gemv",
        property(lambda linear: linear(torch.zeros(1, 32)).shape[1] in [widths[x] for x in gemvs]),
    )
    decoder = make_decoder(config, random_weights(config))
    assert [layer.attention.options.has_gemvs for layer in decoder.layers] == [len(gemvs) == 2] * 2
