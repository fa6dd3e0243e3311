"""Experts in float8, by all names and in stacks, against the dequantised network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_float8_checkpoints import CONTINUATIONS, FLOAT8, LAYOUTS, PROMPT, load, make, save, scores
from tiny_model import TINY_LLAMA
from torch import Tensor

from octavo import SamplingParams
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.gemm.stacked_experts import StackedExperts
from octavo.models import builder

QWEN = TINY_LLAMA | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
MIXTRAL = TINY_LLAMA | {
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
}
SHARED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
GLM = TINY_LLAMA | {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 8, **SHARED},
    **{"n_routed_experts": 4, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
}
MINIMAX = TINY_LLAMA | {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "rotary_dim": 4},
}
CONFIGS = {"own": QWEN, "stacked": QWEN, "mixtral": MIXTRAL, "glm": GLM, "minimax": MINIMAX}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
STACKED_NAMES = {"weight": "", "weight_scale_inv": "_scale_inv", "weight_scale": "_scale"}
STACKED_NAMES |= {"input_scale": "_activation_scale"}


def mixtrals(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by Mixtral's names."""
    renamed = {}
    for name, tensor in tensors.items():
        for here, theirs in MIXTRAL_NAMES.items():
            name = name.replace(f".{here}.", f".{theirs}.")
        renamed[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
    return renamed


def minimaxes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by MiniMax's names: the bias of the choice is not the router's."""
    return {name.replace("moe.gate.e_", "moe.e_"): each for name, each in mixtrals(tensors).items()}


def glms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by GLM's names."""
    return {name.replace(".shared_expert.", ".shared_experts."): each for name, each in tensors.items()}


RENAMED = {"own": dict, "mixtral": mixtrals, "glm": glms, "minimax": minimaxes}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, those of experts in stacks as transformers 5 holds them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        for part, suffix in STACKED_NAMES.items():
            names = [
                [f"{layer}.experts.{e}.{p}_proj.{part}" for e in range(4)] for p in ("gate", "up", "down")
            ]
            if names[0][0] not in tensors:
                continue
            gate, up, down = (torch.stack([view(tensors[each]) for each in every]) for every in names)
            if part == "input_scale":
                # One input, one scale.
                found[f"{layer}.experts.gate_up_proj{suffix}"] = gate.flatten()
                found[f"{layer}.experts.down_proj{suffix}"] = down.flatten()
                continue
            both = torch.cat((gate, up), 1)
            for name, stack in (("gate_up_proj", both), ("down_proj", down)):
                stack = stack.view(FLOAT8) if stack.dtype == torch.uint8 else stack
                found[f"{layer}.experts.{name}{suffix}"] = stack
    return found


def view(tensor: Tensor) -> Tensor:
    """Bytes can be joined, float8 cannot; a single scale is a row."""
    tensor = tensor.view(torch.uint8) if tensor.dtype == FLOAT8 else tensor
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)


def write(folder: Path, layout: str, names: str, **fields: Any) -> dict[str, Tensor]:
    config = CONFIGS[names] | {"quantization_config": LAYOUTS[layout][0]} | fields
    stored, meant = make(layout, config)
    save(folder, config, {**RENAMED, "stacked": stacked}[names](stored))
    return meant


def exact_scores(folder: Path, names: str, meant: dict[str, Tensor]) -> Tensor:
    save(folder, CONFIGS[names], meant)
    return scores(load(folder))


@pytest.mark.parametrize("names", CONFIGS)
@pytest.mark.parametrize("layout", ["blocks", "tensor", "modelopt", "compressed-channel", "compressed-block"])
def test_experts_stay_float8_and_mean_what_they_say(layout: str, names: str, tmp_path: Path) -> None:
    meant = write(tmp_path / "m", layout, names)
    llm = load(tmp_path / "m")
    expected = exact_scores(tmp_path / "exact", names, meant)
    torch.testing.assert_close(scores(llm), expected, rtol=1e-4, atol=1e-4)
    plan = llm.engine.plan
    num_bytes = sum(tensor.numel() for name, tensor in meant.items() if name.endswith("_proj.weight"))
    assert num_bytes <= plan.quantised_bytes["float8"] < 1.5 * num_bytes
    assert plan.dequantised == {}


@pytest.mark.parametrize("names", ["mixtral", "stacked"])
def test_two_ranks_hold_whole_experts_whose_blocks_no_rank_can_cut(names: str, tmp_path: Path) -> None:
    """Of an expert's 96 columns, 32 of which share scales, a rank would have 48; of o_proj's 64 it has 32."""
    size = "intermediate_size" if names == "mixtral" else "moe_intermediate_size"
    write(tmp_path, "blocks", names, head_dim=16, **{size: 96})
    one = load(tmp_path)
    with pytest.raises(ConfigError, match=r"scales for 32 columns each.*, or expert_parallel=True"):
        load(tmp_path, tensor_parallel_size=2)
    two = load(tmp_path, tensor_parallel_size=2, expert_parallel=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [PROMPT, *CONTINUATIONS]
    expected, found = ([o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (one, two))
    assert found == expected
    torch.testing.assert_close(scores(two), scores(one), rtol=1e-5, atol=1e-5)
    assert two.engine.plan.quantised_bytes["float8"] < one.engine.plan.quantised_bytes["float8"]
    two.engine.close()


@pytest.mark.parametrize("names", ["mixtral", "stacked"])
@pytest.mark.parametrize("layout", ["tensor", "compressed-channel"])
def test_stacks_for_a_gpu_are_the_files_numbers(
    layout: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = write(tmp_path, layout, names)
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    experts = load(tmp_path).engine.runner.decoder.layers[1].feed_forward.experts  # type: ignore[attr-defined]
    assert isinstance(experts, StackedExperts)
    prefix = "model.layers.1.mlp.experts.2"
    gate, up, down = (meant[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for weight, exact in ((experts.gate_up, torch.cat((gate, up))), (experts.down, down)):
        assert weight.values.dtype == FLOAT8
        torch.testing.assert_close(weight.dequantise()[2], exact, rtol=1e-6, atol=0)


def test_transformers_names_a_matrixs_only_scale_like_that_of_a_tile(tmp_path: Path) -> None:
    """FP8Experts of a model without weight_block_size: one scale for gate, one for up."""
    meant = write(tmp_path / "m", "tensor", "stacked")
    config = QWEN | {"quantization_config": LAYOUTS["tensor"][0]}
    stored, _ = make("tensor", config)
    tensors = {name.replace("weight_scale", "weight_scale_inv"): each for name, each in stored.items()}
    save(tmp_path / "m", config, stacked(tensors))
    expected = exact_scores(tmp_path / "exact", "stacked", meant)
    torch.testing.assert_close(scores(load(tmp_path / "m")), expected, rtol=1e-4, atol=1e-4)


def test_a_scale_that_gate_and_up_share(tmp_path: Path) -> None:
    """A single one is for both; that of a tile with rows of both is refused by name."""
    meant = write(tmp_path / "m", "tensor", "stacked")
    config: dict[str, Any] = json.loads((tmp_path / "m" / "config.json").read_text())
    stored, _ = make("tensor", config)
    for name, tensor in list(stored.items()):
        if name.endswith("up_proj.weight_scale") and ".experts." in name:
            gate = stored[name.replace("up_proj", "gate_proj")]
            weight = name.removesuffix("_scale")
            meant[weight] = (meant[weight].double() / tensor.double() * gate.double()).float()
    tensors = stacked(stored)
    for name, tensor in list(tensors.items()):
        if name.endswith("gate_up_proj_scale"):
            tensors[name] = tensor[:, :1].contiguous()
    save(tmp_path / "m", config, tensors)
    expected = exact_scores(tmp_path / "exact", "stacked", meant)
    torch.testing.assert_close(scores(load(tmp_path / "m")), expected, rtol=1e-4, atol=1e-4)

    odd = QWEN | {"moe_intermediate_size": 24, "quantization_config": LAYOUTS["blocks"][0]}
    tensors = stacked(make("blocks", odd)[0])
    save(tmp_path / "odd", odd, tensors)
    with pytest.raises(UnsupportedModelError, match="gate and up of 24 rows each share scales for 16 rows"):
        load(tmp_path / "odd")
