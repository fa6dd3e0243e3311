"""gpt-oss against transformers: experts in MXFP4 as published, and dequantised as transformers saves them."""

from collections.abc import Callable
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
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.stacked_experts import StackedExperts
from octavo.models import (
    ModelConfig,
    builder,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
    stored_matrices,
)
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
    llms = [
        LLM(str(folder), kv_cache_dtype="fp8", attention_impl=impl, **OPTIONS)
        for impl in ("torch", "reference")
    ]
    found = [
        llm.generate(PROMPTS["c"], SamplingParams(max_tokens=4, temperature=0, logprobs=1)) for llm in llms
    ]
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


def stacked_layer(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StackedExperts:
    """The experts of layer 1 as a GPU has them."""
    write_folder(tmp_path, TINY, tensors)
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    weights = open_weights(resolve_model(str(tmp_path)))
    experts = make_decoder(CONFIG, weights, quantization="auto").layers[1].feed_forward.experts
    assert isinstance(experts, StackedExperts)
    return experts


def test_stacks_for_a_gpu_hold_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = stacked_layer(TENSORS, tmp_path, monkeypatch)
    for weight, name in zip((experts.gate_up, experts.down), STACKS, strict=True):
        assert isinstance(weight, Mxfp4ExpertWeight)
        stack = dequantised()[f"model.layers.1.mlp.experts.{name}"].transpose(1, 2)
        bias = TENSORS[f"model.layers.1.mlp.experts.{name}_bias"]
        if name == "gate_up_proj":
            stack, bias = (torch.cat((each[:, 0::2], each[:, 1::2]), 1) for each in (stack, bias))
        assert torch.equal(weight.dequantise(), stack)
        assert weight.bias is not None
        assert torch.equal(weight.bias, bias)


def test_scales_beyond_the_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = TENSORS[name].clone()
    scales[3, 4, 1] = 129
    with pytest.raises(UnsupportedModelError, match="scales above 2"):
        stacked_layer(TENSORS | {name: scales}, tmp_path, monkeypatch)


def test_parameters_are_those_of_transformers(model: Any) -> None:
    assert num_parameters(CONFIG) == sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * 64 * 96 + 2 * 96 + 64
    assert num_parameters(CONFIG) - num_active_parameters(CONFIG) == 4 * (6 - 4) * expert


def test_inspect_counts_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = 4 * 6 * 3 * 64 * 96
    stored = stored_matrices(resolve_model(str(folder)))
    shapes = parameter_shapes(CONFIG)
    assert sum(storage.nbytes(shapes[name]) for name, storage in stored.items()) == number * (0.5 + 1 / 32)
    packed = [tensor.nbytes for name, tensor in TENSORS.items() if name.endswith(("_blocks", "_scales"))]
    assert sum(packed) == number * (0.5 + 1 / 32)
    assert stored == stored_matrices(resolve_model(str(folder)), "dummy")
    main(["inspect", str(folder), "--device", "cpu", "--num-blocks", "8"])
    assert "MXFP4" in capsys.readouterr().out


QUANTIZED = TINY["quantization_config"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"swiglu_limit": 5.0}, UnsupportedModelError, "swiglu_limit = 5.0 is not supported"),
        ({"swiglu_alpha": 1.0}, UnsupportedModelError, "swiglu_alpha = 1.0 is not supported"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act = 'gelu' is not supported"),
        ({"num_experts_per_tok": 7}, FileFormatError, r"num_experts_per_tok must be an integer in \[1, 6\]"),
        ({"num_local_experts": None}, FileFormatError, "num_local_experts is missing"),
        ({"layer_types": ["full_attention"]}, FileFormatError, "layer_types must be a list of 4 names"),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "'chunked_attention'"),
        ({"sliding_window": None}, FileFormatError, "sliding_window must be a number of tokens"),
        ({"attention_bias": "yes"}, FileFormatError, "attention_bias must be true or false"),
        ({"rope_scaling": TINY["rope_scaling"] | {"truncate": 0}}, FileFormatError, "truncate must be"),
        ({"rope_scaling": TINY["rope_scaling"] | {"cut": 0}}, UnsupportedModelError, "parameter 'cut'"),
        ({"quantization_config": QUANTIZED | {"bits": 4}}, UnsupportedModelError, "unknown field 'bits'"),
        (
            {"quantization_config": QUANTIZED | {"dequantize": True}},
            UnsupportedModelError,
            "dequantize = True is not supported",
        ),
        (
            {"quantization_config": QUANTIZED | {"modules_to_not_convert": "lm_head"}},
            FileFormatError,
            "modules_to_not_convert must be a list",
        ),
        (
            {"architectures": ["MixtralForCausalLM"]},
            UnsupportedModelError,
            "'mxfp4' is supported for the experts of GptOssForCausalLM, not for MixtralForCausalLM",
        ),
    ],
)
def test_malformed_configs_are_refused_by_name(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.from_hf(TINY | change)


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    tensor = change(TENSORS[name])
    others = {key: value for key, value in TENSORS.items() if key != name}
    return others if tensor is None else others | {name: tensor.contiguous()}


SINKS = "model.layers.2.self_attn.sinks"


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (
            f"{FIRST}.down_proj_scales",
            lambda t: None,
            WeightsError,
            "lacks .*down_proj_scales, which belongs to",
        ),
        (
            f"{FIRST}.down_proj_blocks",
            lambda t: None,
            UnsupportedModelError,
            "down_proj_scales has the type U8",
        ),
        (f"{FIRST}.down_proj_scales", lambda t: t[:, :, :2], WeightsError, r"is \[6, 64, 2\], expected"),
        (f"{FIRST}.down_proj_blocks", lambda t: t[..., :15], WeightsError, "columns / 32, 16"),
        (f"{FIRST}.gate_up_proj_blocks", lambda t: t[:, :191], WeightsError, "as many rows of gate as of up"),
        (f"{FIRST}.down_proj_blocks", lambda t: t.view(torch.int8), UnsupportedModelError, "has the type I8"),
        (f"{FIRST}.down_proj_scales", lambda t: t | 255, WeightsError, "exponents of 255"),
        (f"{FIRST}.down_proj_bias", lambda t: None, WeightsError, r"lacks .*0\.down_proj\.bias"),
        (f"{FIRST}.down_proj_bias", lambda t: t[:, :63], WeightsError, r"bias is \[63\], expected \[64\]"),
        (SINKS, lambda t: None, WeightsError, "lacks model.layers.2.self_attn.sinks"),
        (SINKS, lambda t: t[:4], WeightsError, r"sinks is \[4\], expected \[8\]"),
        ("lm_head.weight", lambda t: t.byte(), UnsupportedModelError, "lm_head.weight has the type U8"),
    ],
)
def test_malformed_checkpoints_are_refused_by_name(
    name: str, change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, TINY, changed(name, change))
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), **OPTIONS)


def test_experts_in_mxfp4_and_in_floats_are_refused(tmp_path: Path) -> None:
    """Trap: which of them was read depended on the order of a set."""
    floats = {f"{FIRST}.gate_up_proj": torch.zeros(6, 64, 192)}
    write_folder(tmp_path, TINY, TENSORS | floats)
    with pytest.raises(WeightsError, match=r"has .*experts\.0\.gate_proj\.weight twice"):
        LLM(str(tmp_path), **OPTIONS)
