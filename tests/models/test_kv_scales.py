"""Scales of a float8 cache that a checkpoint brings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import DictWeights, make_decoder, random_weights
from safetensors.torch import save_file
from tiny_model import TINY_LLAMA

from octavo import LLM, SamplingParams
from octavo.errors import WeightsError
from octavo.models import ModelConfig
from octavo.models.loader import kv_scale_names, read_kv_scales
from octavo.parallel import TensorParallel

CONFIG = ModelConfig.from_hf(TINY_LLAMA)
NUM_LAYERS, NUM_KV_HEADS = 2, 2


def weights_with(*, per_head: bool, **changed: torch.Tensor) -> DictWeights:
    """Random weights, and scales 1, 2, 3, ... of layer 0's keys, its values, layer 1's keys, ..."""
    weights = random_weights(CONFIG)
    for index, name in enumerate(kv_scale_names(CONFIG), start=1):
        heads = [float(index), index + 0.5] if per_head else [float(index)]
        weights.tensors[name] = torch.tensor(heads)
    weights.tensors |= changed
    return weights


def test_names_are_vllms() -> None:
    assert kv_scale_names(CONFIG)[2:] == [
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_scale",
    ]


def test_none_are_needed() -> None:
    assert make_decoder(CONFIG, random_weights(CONFIG)).kv_scales is None


def test_tools_write_more_dimensions() -> None:
    """Trap: llm-compressor writes [KH, 1, 1] for a cache with a scale for each head."""
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor([1.0, 1.5]).view(2, 1, 1)}
    scales = make_decoder(CONFIG, weights_with(per_head=False, **scale)).kv_scales
    assert scales is not None
    assert scales[0, 0].tolist() == [1, 1.5]


@pytest.mark.parametrize("per_head", [False, True])
def test_a_scale_is_for_a_layer_or_for_each_of_its_heads(per_head: bool) -> None:
    scales = make_decoder(CONFIG, weights_with(per_head=per_head)).kv_scales
    second = 0.5 if per_head else 0.0
    assert scales is not None
    assert scales.tolist() == [[[1, 1 + second], [2, 2 + second]], [[3, 3 + second], [4, 4 + second]]]


def test_a_rank_gets_those_of_its_heads() -> None:
    scales = read_kv_scales(weights_with(per_head=True), CONFIG, TensorParallel.not_met(1, 2))
    assert scales is not None
    assert scales.tolist() == [[[1.5], [2.5]], [[3.5], [4.5]]]


def test_scales_of_queries_are_ignored() -> None:
    query = {"model.layers.0.self_attn.q_scale": torch.ones(1)}
    assert make_decoder(CONFIG, weights_with(per_head=False, **query)).kv_scales is not None


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"expected \[1\] or \[2\]"),
        (torch.ones(2, 2), r"expected \[1\] or \[2\]"),
    ],
)
def test_misshapen_scales_are_refused_by_name(scale: torch.Tensor, message: str) -> None:
    weights = weights_with(per_head=False, **{"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(WeightsError, match=rf"model\.layers\.1\.self_attn\.k_scale.*{message}"):
        make_decoder(CONFIG, weights)


@pytest.mark.parametrize("scale", [[0.0], [1.0, -1.0], [torch.inf], [torch.nan]])
def test_a_float8_cache_refuses_bad_scales_by_name(scale: list[float], tmp_path: Path) -> None:
    """Trap: llm-compressor 0.8 wrote zeros; without such a cache they do not matter."""
    weights = weights_with(per_head=False, **{"model.layers.1.self_attn.k_scale": torch.tensor(scale)})
    load(tmp_path, weights.tensors)
    named = r"model\.layers\.1\.self_attn\.k_scale must hold finite numbers above 0.*use kv_cache_dtype"
    with pytest.raises(WeightsError, match=named):
        load(tmp_path, weights.tensors, kv_cache_dtype="fp8")


def test_some_without_others_are_refused() -> None:
    weights = weights_with(per_head=False)
    del weights.tensors["model.layers.1.self_attn.v_scale"]
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.1\.self_attn\.v_scale"):
        make_decoder(CONFIG, weights)


def load(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> LLM:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return LLM(str(folder), device="cpu", num_blocks=64, block_size=4, **options)


def test_an_engine_stores_by_them(tmp_path: Path) -> None:
    """Keys far beyond the largest float8 number: clipped without scales, exact to three bits with them."""
    weights = random_weights(CONFIG)
    for layer in range(NUM_LAYERS):
        weights.tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] *= 30000
        weights.tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] /= 30000
    plain = dict(weights.tensors)
    keys = {name: torch.tensor([64.0]) for name in kv_scale_names(CONFIG) if name.endswith("k_scale")}
    values = {name: torch.tensor([1.0]) for name in kv_scale_names(CONFIG) if name.endswith("v_scale")}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def logprobs(llm: LLM) -> torch.Tensor:
        output = llm.generate([list(range(3, 60))], params)[0]
        assert output.prompt_logprobs is not None
        return torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry])

    exact = logprobs(load(tmp_path / "exact", plain | keys | values))
    scaled_llm = load(tmp_path / "scaled", plain | keys | values, kv_cache_dtype="fp8")
    scaled = logprobs(scaled_llm)
    clipped = logprobs(load(tmp_path / "clipped", plain, kv_cache_dtype="fp8"))
    scales = scaled_llm.engine.runner.kv_cache.scales
    assert scales is not None
    assert scales.tolist() == [[[64.0] * NUM_KV_HEADS, [1.0] * NUM_KV_HEADS]] * NUM_LAYERS
    assert (scaled - exact).abs().mean() < 0.5 * (clipped - exact).abs().mean()
