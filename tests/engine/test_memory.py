"""How many sequences a step may have: said by the user, or decided by the device."""

import pytest
import torch
from tiny_model import TINY_LLAMA

from octavo import EngineConfig
from octavo.engine.memory import ExecutionPlan, plan_execution
from octavo.errors import ConfigError
from octavo.models import ModelConfig


def make_plan(**options: object) -> ExecutionPlan:
    config = EngineConfig.from_dict({"model": "tiny", "device": "cpu"} | options)
    return plan_execution(config, ModelConfig.from_hf(TINY_LLAMA))


def test_a_cpu_runs_256_sequences_at_once() -> None:
    assert EngineConfig(model="tiny").max_num_seqs is None
    plan = make_plan()
    assert plan.max_num_seqs == 256
    assert plan.num_blocks <= 256 * TINY_LLAMA["max_position_embeddings"] // plan.block_size


def test_a_gpu_runs_512_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))
    plan = make_plan(device="cuda")
    assert plan.max_num_seqs == 512
    assert make_plan(device="cuda", max_num_seqs=256).working_bytes < plan.working_bytes


@pytest.mark.parametrize("number", [1, 3, 1000])
def test_as_many_as_the_user_says(number: int) -> None:
    plan = make_plan(max_num_seqs=number, max_model_len=64)
    assert plan.max_num_seqs == number
    assert plan.num_blocks == number * -(-64 // plan.block_size), "room for all of them, and no more"


@pytest.mark.parametrize("number", [0, -1, 2**31, 1.5, True, "8"])
def test_refuses_what_is_no_number_of_sequences(number: object) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be a positive integer"):
        EngineConfig.from_dict({"model": "tiny", "max_num_seqs": number})
