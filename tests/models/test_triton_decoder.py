"""Decoders with fused and with row-invariant products against plain ones, in Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import PagedSequences, make_decoder, random_weights, run_chunked
from gpt_oss_checkpoints import TINY as GPT_OSS
from gpt_oss_checkpoints import make_tensors, write_folder

from octavo.gemm.cpu import mkl as packed
from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.linear import UnfusedLinear
from octavo.gemm.portable import invariant_tiling, skinny_tiling
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers import FeedForward
from octavo.layers.expert_feed_forward import DenseAndExperts
from octavo.models import Decoder, ModelConfig, builder
from octavo.models.decoder import DecoderLayer
from octavo.models.source import open_weights, resolve_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with the interpreter")
TINY: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qk norms, tied": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "queries that grow": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "post norms, soft caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "keys as values, shared caches, layer inputs": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 37,
        "final_logit_softcapping": 30.0,
    },
    "experts beside a feed-forward": {
        "architectures": ["Gemma4ForCausalLM"],
        "sliding_window": 6,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}
PROMPTS = {"a": list(range(9)), "b": [3, 1, 4, 1, 5]}


@pytest.mark.skipif(
    INTERPRETED or find_spec("triton") is None, reason="the process started here needs triton"
)
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{3 * len(CASES) + 1} passed" in done.stdout


def dense_part(layer: DecoderLayer) -> FeedForward:
    block = layer.feed_forward
    block = block.dense if isinstance(block, DenseAndExperts) else block
    assert isinstance(block, FeedForward)
    return block


def logits_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return run_chunked(PagedSequences(decoder, block_size=4), PROMPTS)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_same_logits_as_without(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_hf(TINY | CASES[case])
    plain = make_decoder(config, random_weights(config), attention_impl="torch")
    monkeypatch.setattr(packed, "unsupported_reason", lambda weight: "not here")
    monkeypatch.setattr(skinny_tiling, "has_triton", lambda tensor: True)
    fused = make_decoder(config, random_weights(config), attention_impl="torch")
    assert isinstance(plain.layers[0].attention.qkv_proj.projection, UnfusedLinear)
    assert isinstance(fused.layers[0].attention.qkv_proj.projection, GpuLinear)
    assert isinstance(dense_part(fused.layers[1]).down_proj.projection, GpuLinear)
    expected, got = logits_of(plain), logits_of(fused)
    for name in PROMPTS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_same_logits_by_row_invariant_products(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_hf(TINY | CASES[case])
    plain = make_decoder(config, random_weights(config), attention_impl="torch")
    monkeypatch.setattr(invariant_tiling, "has_triton", lambda tensor: True)
    made = make_decoder(config, random_weights(config), attention_impl="torch", deterministic=True)
    assert made.deterministic
    for layer in made.layers:
        inputs = (layer.attention.qkv_proj, dense_part(layer).gate_up_proj)
        outputs = (layer.attention.o_proj, dense_part(layer).down_proj)
        for part in (*inputs, *outputs):
            assert type(part.projection).__name__ == "InvariantLinear"
    # Attention of deterministic steps is the GPU kernels', and tested with them.
    expected, got = logits_of(plain), logits_of(replace(made, deterministic=False))
    for name in PROMPTS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_same_logits_of_a_token_alone_in_its_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation, store and attention in one kernel, between projections that pass for GEMVs."""
    from octavo.attention.step import fused_decode

    calls: list[Any] = []

    def attend_fused(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(given)
        return fused_decode.attend_fused(*given, **options)

    config = ModelConfig.from_hf(TINY | CASES[case])
    plain = make_decoder(config, random_weights(config), attention_impl="torch")
    monkeypatch.setattr(UnfusedLinear, "has_gemv", True)
    made = make_decoder(config, random_weights(config), attention_impl="triton")
    monkeypatch.setattr("octavo.layers.steps.gpu_step.attend_fused", attend_fused)
    expected, got = (PagedSequences(decoder, block_size=4) for decoder in (plain, made))
    for tokens in ([3, 1, 4, 1, 5], *([token] for token in range(9))):
        rows = [sequences.step({"a": tokens})["a"] for sequences in (got, expected)]
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    assert len(calls) == 9 * len(config.cache_layers)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gpt_oss_with_stacked_experts_and_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and MXFP4 experts in Triton against both in PyTorch; prompts are longer than the window."""
    fields = GPT_OSS | {"num_hidden_layers": 2, "layer_types": None, "intermediate_size": 32}
    fields |= {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    write_folder(tmp_path, fields, make_tensors(fields))
    config = ModelConfig.from_hf(fields)
    weights = open_weights(resolve_model(str(tmp_path)))
    plain = make_decoder(config, weights, attention_impl="torch", quantization="none")
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    made = make_decoder(config, weights, attention_impl="triton", quantization="auto")
    assert isinstance(made.layers[0].feed_forward.experts, StackedExperts)
    expected, got = logits_of(plain), logits_of(made)
    for name in PROMPTS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
