"""gpt-oss against transformers: experts in MXFP4 as published, and dequantised as transformers saves them."""

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
    make_decoder,
    quiet_transformers,
    run_chunked,
)
from gpt_oss_checkpoints import TINY, make_tensors, write_folder
from test_decoder_families import make_prompts
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.errors import FileFormatError, UnsupportedModelError, WeightsError
from octavo.layers.moe.stacked import StackedExperts
from octavo.layers.moe.weight import Mxfp4ExpertWeight
from octavo.models import ModelConfig, builder, num_active_parameters, num_parameters
from octavo.models.experts import loading
from octavo.models.source import open_weights, resolve_model

transformers = pytest.importorskip("transformers")

TENSORS = make_tensors(TINY)
CONFIG = ModelConfig.from_hf(TINY)
PROMPTS = make_prompts(TINY["vocab_size"])
STACKS = ("gate_up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts"
OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 96, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def dequantised() -> dict[str, Tensor]:
    """The tensors as transformers saves them: stacks [E, K, N] of floats."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = dict(TENSORS)
    for name in [name.removesuffix("_blocks") for name in TENSORS if name.endswith("_blocks")]:
        packed = (tensors.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        tensors[name] = convert_moe_packed_tensors(*packed, dtype=torch.float32)
    return tensors


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers' network of the dequantised weights."""
    fields = {key: value for key, value in TINY.items() if key != "quantization_config"}
    with quiet_transformers():
        config = transformers.GptOssConfig(**fields)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        made.load_state_dict(dequantised())
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt-oss")
    write_folder(path, TINY, TENSORS)
    return path


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_logits_and_greedy_tokens_equal_transformers(impl: str, model: Any) -> None:
    decoder = make_decoder(CONFIG, DictWeights(dequantised()), attention_impl=impl)
    sequences = PagedSequences(decoder, block_size=3)
    logits = run_chunked(sequences, PROMPTS)
    for name, tokens in PROMPTS.items():
        torch.testing.assert_close(logits[name], hugging_face_logits(model, tokens), atol=5e-4, rtol=1e-4)
    continued = greedy(sequences, logits, 6)
    for name, tokens in PROMPTS.items():
        assert continued[name] == hugging_face_greedy(model, tokens, 6)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_published_folder_generates_what_transformers_does(
    quantization: str, model: Any, folder: Path
) -> None:
    """Prompts that share a prefix read it once, in layers with a window and in others."""
    llm = LLM(str(folder), quantization=quantization, **OPTIONS)
    assert ("mxfp4" in llm.engine.plan.quantised_bytes) == (quantization == "auto")
    prompts = [[*PROMPTS["c"], 3], [*PROMPTS["c"], 5], PROMPTS["a"], PROMPTS["b"]]
    expected = [hugging_face_greedy(model, prompt, 8) for prompt in prompts]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].num_cached_tokens > 0


def test_float8_caches_have_sinks_too(folder: Path) -> None:
    llms = [LLM(str(folder), kv_cache_dtype="fp8", attention_impl=impl, **OPTIONS) for impl in ("torch", "reference")]
    found = [llm.generate(PROMPTS["c"], SamplingParams(max_tokens=4, temperature=0, logprobs=1)) for llm in llms]
    first, second = (output[0].outputs[0] for output in found)
    assert first.token_ids == second.token_ids
    for one, two in zip(first.logprobs or [], second.logprobs or [], strict=True):
        assert {t: v.logprob for t, v in one.items()} == pytest.approx(
            {t: v.logprob for t, v in two.items()}, abs=1e-3
        )


def test_dummy_experts_are_mxfp4(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", **OPTIONS)
    assert set(llm.engine.plan.quantised_bytes) == {"mxfp4"}
    assert len(llm.generate(PROMPTS["a"], GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stacks_for_a_gpu_hold_what_transformers_does(
    load_format: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    shapes = loading_shapes = builder.ModelConfig
    source = resolve_model(str(folder), load_format)
    from octavo.models import parameter_shapes

    weights = open_weights(source, load_format, shapes=parameter_shapes(CONFIG))
    decoder = make_decoder(CONFIG, weights, quantization="auto")
    experts = decoder.layers[1].feed_forward.experts
    assert isinstance(experts, StackedExperts)
    if load_format == "dummy":
        return
    for weight, name in zip((experts.gate_up, experts.down), STACKS, strict=True):
        assert isinstance(weight, Mxfp4ExpertWeight)
        stack = dequantised()[f"model.layers.1.mlp.experts.{name}"].transpose(1, 2)
        bias = TENSORS[f"model.layers.1.mlp.experts.{name}_bias"]
        if name == "gate_up_proj":
            stack, bias = (torch.cat((each[:, 0::2], each[:, 1::2]), 1) for each in (stack, bias))
        assert torch.equal(weight.dequantise(), stack)
        assert weight.bias is not None
        assert torch.equal(weight.bias, bias)
