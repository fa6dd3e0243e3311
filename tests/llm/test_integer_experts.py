"""Experts of AWQ, GPTQ and compressed-tensors checkpoints, against the network that their numbers mean."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import CONFIG, FIELDS, make, write
from test_float8_experts import glms, mixtrals
from test_integer_checkpoints import logprobs
from torch import Tensor

from octavo import LLM
from octavo.engine.step.result import LateWork
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.forms.base import Storage
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.expert_feed_forward import ExpertFeedForward
from octavo.models import ModelConfig, builder, load_decoder, open_weights, read_config, resolve_model
from octavo.models.storage import kept_storage
from octavo.parallel import TensorParallel

# A token goes to all experts: rounding chooses no others.
QWEN = CONFIG | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True},
}
MIXTRAL = CONFIG | {
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
    **{"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 128},
}
# The first layer is dense; beside the experts, every token goes to two that are as one of twice their width.
GLM = CONFIG | {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 4},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
EXPERT = "model.layers.1.mlp.experts.2"
NAMES = ["awq-32", "awq-128", "gptq-ordered", "gptq-8-asymmetric", "compressed-asymmetric", "compressed--1"]


def make_experts(name: str, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gate and up of an expert have one input, so one order of its columns."""
    stored, meant = make(FIELDS[name], config)
    for key in [key for key in stored if key.endswith("gate_proj.g_idx")]:
        up = key.replace("gate_proj", "up_proj")
        if torch.equal(stored[key], stored[up]):
            continue
        weight = f"{up.removesuffix('g_idx')}weight"
        before, after = (groups.long().argsort(stable=True) for groups in (stored[up], stored[key]))
        columns = torch.empty_like(meant[weight])
        columns[:, after] = meant[weight][:, before]
        meant[weight] = columns
        # Words hold 8 rows of the transposed matrix.
        rows = unpacked(stored[f"{up.removesuffix('g_idx')}qweight"])
        moved = torch.empty_like(rows)
        moved[after] = rows[before]
        stored[f"{up.removesuffix('g_idx')}qweight"] = repacked(moved)
        stored[up] = stored[key].clone()
    return stored, meant


def unpacked(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
    return (words[:, None] >> shifts & 15).view(-1, words.shape[1])


def repacked(rows: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4)[:, None]
    words = (rows.view(-1, 8, rows.shape[1]).long() << shifts).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def saved(folder: Path, name: str, config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    stored, meant = make_experts(name, config)
    stored = mixtrals(stored) if config is MIXTRAL else glms(stored)
    return write(folder, stored, config | {"quantization_config": FIELDS[name]}), meant


@pytest.mark.parametrize("config", [QWEN, MIXTRAL, GLM], ids=["qwen", "mixtral", "glm"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_what_its_numbers_mean(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    model, meant = saved(tmp_path / "stored", name, config)
    expected = logprobs(write(tmp_path / "meant", meant, config))
    torch.testing.assert_close(logprobs(model, quantization="none"), expected, rtol=1e-5, atol=1e-5)
    # Products with packed weights round activations to 8 bits.
    errors = (logprobs(model) - expected).abs()
    assert errors.max() > 1e-5
    assert errors.mean() < 0.15


def dequantised(weight: PackedExpertWeight, expert: int) -> Tensor:
    floats = weight.dequantise()[expert]
    return floats if weight.order is None else floats[:, weight.order[expert].long().argsort()]


@pytest.mark.parametrize("name", NAMES)
def test_stacks_for_a_gpu_are_the_files_numbers(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, meant = saved(tmp_path, name, MIXTRAL)
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    llm = LLM(model, device="cpu", num_blocks=8, block_size=4)
    experts = llm.engine.runner.decoder.layers[1].feed_forward.experts  # type: ignore[attr-defined]
    assert isinstance(experts, StackedExperts)
    assert isinstance(experts.gate_up, PackedExpertWeight)
    assert isinstance(experts.down, PackedExpertWeight)
    assert (experts.down.order is not None) == (name == "gptq-ordered")
    gate, up, down = (meant[f"{EXPERT}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for weight, exact in ((experts.gate_up, torch.cat((gate, up))), (experts.down, down)):
        # Minimums have 11 bits.
        torch.testing.assert_close(dequantised(weight, 2), exact, rtol=0, atol=2e-3 * exact.abs().max())


def feed_forward(model: str, rank: int, size: int, *, expert_parallel: bool) -> ExpertFeedForward:
    """The second layer's, as a rank loads it."""
    source = resolve_model(model, "auto")
    with closing(open_weights(source, "auto")) as weights:
        decoder = load_decoder(
            ModelConfig.from_hf(read_config(source)),
            weights,
            **{"dtype": torch.float32, "device": "cpu", "quantization": "auto"},
            parallel=TensorParallel.not_met(rank, size),
            expert_parallel=expert_parallel,
        )
    found = decoder.layers[1].feed_forward
    assert isinstance(found, ExpertFeedForward)
    return found


@pytest.mark.parametrize("config", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_ranks_hold_whole_experts_whose_groups_no_rank_can_cut(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 columns, a group, each rank would have 16."""
    key = "intermediate_size" if config is MIXTRAL else "moe_intermediate_size"
    stored, meant = make_experts("awq-32", config | {key: 32})
    fields = config | {key: 32, "quantization_config": FIELDS["awq-32"]}
    model = write(tmp_path, mixtrals(stored) if config is MIXTRAL else stored, fields)
    with pytest.raises(ConfigError, match=r"groups of 32 columns.*, or expert_parallel=True"):
        feed_forward(model, 0, 2, expert_parallel=False)
    one, *two = (feed_forward(model, *rank, expert_parallel=True) for rank in ((0, 1), (0, 2), (1, 2)))
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    expected = one.experts(x, one.router(x))
    found = sum(each.experts(x, each.router(x)) for each in two)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    stacked = feed_forward(model, 1, 2, expert_parallel=True).experts
    assert isinstance(stacked, StackedExperts)
    assert isinstance(stacked.down, PackedExpertWeight)
    assert (stacked.down.shape[0], stacked.num_elsewhere) == (2, 2)
    # The rank's first expert is number 2.
    exact = meant[f"{EXPERT}.down_proj.weight"]
    torch.testing.assert_close(dequantised(stacked.down, 0), exact, rtol=0, atol=2e-3 * exact.abs().max())


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "gptq-ordered",
            "up_proj.g_idx",
            f"{EXPERT}.up_proj.weight has its columns in another order than the",
        ),
        (
            "awq-32",
            "gate_proj.weight",
            f"{EXPERT}.gate_proj.weight is stored as floats, .* as blocks: experts",
        ),
    ],
)
def test_experts_that_differ_are_refused_by_name(
    tmp_path: Path, name: str, changed: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, meant = make_experts(name, QWEN)
    key = f"{EXPERT}.{changed}"
    if changed.endswith("g_idx"):
        stored[key] = stored[key].flip(0)
    else:
        layer = key.removesuffix("weight")
        stored = {each: tensor for each, tensor in stored.items() if not each.startswith(layer)}
        stored[key] = meant[key]
        stored |= {f"{EXPERT}.up_proj.weight": meant[f"{EXPERT}.up_proj.weight"]}
        stored = {each: t for each, t in stored.items() if not re.match(rf"{EXPERT}\.up_proj\.[qs]", each)}
    model = write(tmp_path, stored, QWEN | {"quantization_config": FIELDS[name]})
    monkeypatch.setattr(builder, "stacks_experts", lambda weight: True)
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(model, device="cpu", num_blocks=8, block_size=4)


def test_what_no_kernel_multiplies_is_refused_by_name() -> None:
    """On a GPU, experts never silently take a multiple of their bytes."""
    name = f"{EXPERT}.up_proj.weight"
    stored = {
        name: Storage("odd blocks", 4),
        "model.layers.1.self_attn.o_proj.weight": Storage("odd blocks", 4),
    }
    options = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    with pytest.raises(
        ConfigError, match=rf"{re.escape(name)} cannot be multiplied as odd blocks: no kernel .*\"none\""
    ):
        kept_storage(stored, stored, "auto", **options)
    assert kept_storage(stored, stored, "none", **options) == {}
    assert kept_storage(stored, stored, "auto", **options, deterministic=True) == {}
    blocks = {name: Storage("blocks", 1)}
    with pytest.raises(ConfigError, match=r"needs float16 or bfloat16 .* got torch.float32"):
        kept_storage(blocks, blocks, "auto", device=torch.device("cuda"), dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_a_gpu(tmp_path: Path, name: str) -> None:
    """Packed experts in an engine with graphs, at few and many rows, against floats of the same numbers."""
    model, meant = saved(tmp_path / "stored", name, QWEN)
    prefix, continuations = [1, 5, 7, 9], [[3, 8, 60, 2, 44], [90, 0, 12, 31, 5]]

    def scores(path: str, **options: Any) -> Tensor:
        llm = LLM(path, device="cuda", dtype="bfloat16", num_blocks=64, max_num_seqs=8, **options)
        found = [llm.score(each, continuations) for each in (prefix, list(range(90)) * 4)]
        assert llm.stats.late_work == LateWork(0, 0, 0)
        experts = llm.engine.runner.decoder.layers[1].feed_forward.experts  # type: ignore[attr-defined]
        assert isinstance(experts, StackedExperts)
        assert isinstance(experts.gate_up, PackedExpertWeight) == (not options)
        return torch.tensor([part.token_logprobs for parts in found for part in parts])

    exact = logprobs(write(tmp_path / "meant", meant, QWEN))
    floats, packed = scores(model, quantization="none"), scores(model)
    assert (packed[:2] - exact).abs().max() < 2 * (floats[:2] - exact).abs().max() + 0.05
    assert (packed - floats).abs().max() < 0.1
