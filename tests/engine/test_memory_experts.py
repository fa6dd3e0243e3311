"""What is planned and shown of mixtures of experts before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import EngineConfig
from octavo.cli import main
from octavo.engine.memory.execution_plan import weight_groups
from octavo.engine.memory.plan import plan_execution
from octavo.engine.memory.working import rank_share
from octavo.models import ModelConfig, num_active_parameters, num_parameters
from octavo.parallel import TensorParallel

# Qwen3-30B-A3B.
LARGE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see a GPU of 128 GiB, all of it free."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**37, 2**37))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_parameters_are_those_that_the_model_has() -> None:
    model = ModelConfig.from_hf(LARGE)
    assert num_parameters(model) == 30_532_122_624
    assert num_active_parameters(model) == 3_353_032_704


def test_a_rank_holds_a_part_of_every_expert() -> None:
    model = ModelConfig.from_hf(LARGE)
    share = rank_share(model, TensorParallel.not_met(1, 2), expert_parallel=False)
    assert share.experts is not None
    assert share.experts == replace(model.experts, size=384)
    # The norms and the routers are on both ranks.
    assert num_parameters(share) == pytest.approx(num_parameters(model) / 2, rel=1e-3)


@pytest.mark.parametrize(("rank", "held"), [(0, range(42)), (1, range(42, 85)), (2, range(85, 128))])
def test_a_rank_holds_whole_experts(rank: int, held: range) -> None:
    model = ModelConfig.from_hf(LARGE | {"num_attention_heads": 24, "num_key_value_heads": 3})
    share = rank_share(model, TensorParallel.not_met(rank, 3), expert_parallel=True)
    assert share.experts == replace(model.experts, held=held)
    groups = weight_groups(share, torch.bfloat16, {}, "auto", torch.device("cuda"))
    (experts,) = [group for group in groups if group.part == "experts"]
    assert experts.num_bytes == 48 * len(held) * 3 * 768 * 2048 * 2


def test_activations_of_routed_rows_are_counted(one_gpu: None) -> None:
    model = ModelConfig.from_hf(LARGE)
    config = EngineConfig(model="x", device="cuda", max_num_seqs=8, max_model_len=64, share_prefixes=False)
    plans = [plan_execution(replace(config, max_num_batched_tokens=number), model) for number in (1024, 2048)]
    # Of each token 8 rows: gate and up multiplied, and the result.
    assert plans[1].working_bytes - plans[0].working_bytes > 1024 * 8 * 2 * (768 + 2048)


def test_float8_experts_take_a_byte_a_number(one_gpu: None) -> None:
    model = ModelConfig.from_hf(LARGE | {"num_hidden_layers": 2, "vocab_size": 1000})
    plans = [
        plan_execution(EngineConfig(model="x", device="cuda", quantization=quantization), model)
        for quantization in ("none", "fp8")
    ]
    assert plans[1].weight_bytes == pytest.approx(plans[0].weight_bytes / 2, rel=0.02)


def test_inspect_shows_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = LARGE | {"num_hidden_layers": 4, "vocab_size": 100, "num_experts": 6, "mlp_only_layers": [1]}
    (tmp_path / "config.json").write_text(json.dumps(small | {"num_experts_per_tok": 2}))
    main(["inspect", str(tmp_path), "--load-format", "dummy", "--num-blocks", "7", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "6 of size 768 in 3 layers" in shown
    assert "active parameters of a token" in shown
    assert "feed-forward size of the other layers" in shown
