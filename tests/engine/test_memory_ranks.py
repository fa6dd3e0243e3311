"""A rank plans what it holds: bytes planned against bytes of a decoder that is loaded for that rank."""

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_checkpoints import TINY as GPT_OSS
from tiny_model import TINY_LLAMA
from torch import Tensor

from octavo import EngineConfig
from octavo.engine.memory import plan_execution, rank_device, require_devices
from octavo.engine.runner_setup import make_runner, read_decoder
from octavo.errors import ConfigError
from octavo.models import ModelConfig, stored_matrices
from octavo.models.source import ModelSource
from octavo.parallel import TensorParallel

FIELDS = TINY_LLAMA | {
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
}
CONFIG = EngineConfig(model="tiny", device="cpu", dtype="bfloat16", load_format="dummy", num_blocks=8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(FIELDS))
    return ModelSource("folder", folder)


class Silent:
    """A group whose other ranks add nothing."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, tensor]


def rank(number: int, size: int) -> TensorParallel:
    return TensorParallel(number, size, Silent() if size > 1 else None)


def bytes_held(thing: object) -> int:
    """Bytes of all tensors that can be reached from an object, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [thing]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | str):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple | dict) or type(item).__module__.startswith("octavo"):
            todo += gc.get_referents(item)
    return sum(storages.values())


@pytest.mark.parametrize(("number", "size"), [(0, 1), (1, 2)])
def test_scales_of_float8_weights_are_planned_as_well(number: int, size: int, source: ModelSource) -> None:
    config, model = dataclasses.replace(CONFIG, quantization="fp8"), ModelConfig.from_hf(FIELDS)
    plan = plan_execution(config, model, rank(number, size))
    decoder = read_decoder(source, plan, None)
    rope_bytes = 2 * model.head_dim // 2 * 4 * len(model.ropes)
    assert 0 <= bytes_held(decoder) - rope_bytes - plan.weight_bytes < 16
    assert 0 < plan.quantised_bytes["float8"] < plan.weight_bytes
    assert plan.weight_bytes < plan_execution(CONFIG, model, rank(number, size)).weight_bytes


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("number", "size"), [(0, 1), (0, 2), (1, 2)])
def test_experts_in_mxfp4_are_planned_as_they_are_held(
    number: int, size: int, whole: bool, tmp_path: Path
) -> None:
    """Three blocks of an expert: the second rank has two of them. Of five whole experts it has three."""
    fields = GPT_OSS | {"num_local_experts": 5} if whole else GPT_OSS
    (tmp_path / "config.json").write_text(json.dumps(fields))
    source, model = ModelSource("folder", tmp_path), ModelConfig.from_hf(fields)
    config = dataclasses.replace(CONFIG, expert_parallel=whole)
    plan = plan_execution(config, model, rank(number, size), stored=stored_matrices(source, "dummy"))
    decoder = read_decoder(source, plan, None)
    rope_bytes = 2 * model.head_dim // 2 * 4 * len(model.ropes)
    held = bytes_held(decoder) - rope_bytes - plan.weight_bytes
    # The second rank has no use for the biases of o_proj, and of down_proj if each rank has a part of it.
    num_biases = 64 if whole else 64 + 6 * 64
    assert held == (0 if number == 0 else -2 * 4 * num_biases)
    assert set(plan.quantised_bytes) == {"mxfp4"}


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("number", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_rank_holds_what_it_planned(
    num_kv_heads: int, tied: bool, number: int, size: int, source: ModelSource
) -> None:
    """With 2 and 4 ranks on 1 kv head each holds a copy of it."""
    model = ModelConfig.from_hf(FIELDS | {"num_key_value_heads": num_kv_heads, "tie_word_embeddings": tied})
    plan = plan_execution(CONFIG, model, rank(number, size))
    decoder = read_decoder(source, plan, None)
    # Beside weights a decoder holds the ropes' frequencies and lengths, and a scalar or two.
    rope_bytes = 2 * model.head_dim // 2 * 4 * len(model.ropes)
    assert 0 <= bytes_held(decoder) - rope_bytes - plan.weight_bytes < 16
    runner = make_runner(decoder, plan)
    assert runner.kv_cache.nbytes == plan.kv_bytes
    whole = plan_execution(CONFIG, model)
    assert plan.num_parameters == whole.num_parameters
    assert plan.kv_bytes == whole.kv_bytes // min(size, num_kv_heads)
    assert (plan.weight_bytes < whole.weight_bytes) == (size > 1)
    assert (plan.working_bytes < whole.working_bytes) == (size > 1)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    config = dataclasses.replace(CONFIG, num_blocks=None, memory_fraction=1.0, max_num_seqs=2**20)
    model = ModelConfig.from_hf(FIELDS | {"num_key_value_heads": 2})
    whole, half = (plan_execution(config, model, rank(0, size)) for size in (1, 2))
    # What others take meanwhile may differ a little.
    assert half.free_bytes == pytest.approx(whole.free_bytes / 2, rel=0.2)
    assert half.kv_bytes == pytest.approx(whole.kv_bytes / 2, rel=0.25)
    assert half.num_blocks == pytest.approx(whole.num_blocks, rel=0.25)


def test_gpus_that_this_machine_lacks_can_be_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**34 + device.index, 2**36))
    model = ModelConfig.from_hf(FIELDS)
    config = dataclasses.replace(CONFIG, device="cuda", num_blocks=None)
    plans = [plan_execution(config, model, rank(number, 4)) for number in range(4)]
    assert [plan.device for plan in plans] == [torch.device("cuda", number) for number in range(4)]
    assert {plan.free_bytes for plan in plans} == {2**34}
    assert len({plan.num_blocks for plan in plans}) == 1
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 needs as many GPUs, but torch sees 1"):
        require_devices(plans[0].device, plans[0].parallel)
    with pytest.raises(ConfigError, match="device must be auto or cuda where 2 ranks have a GPU each"):
        plan_execution(dataclasses.replace(config, device="cuda:0"), model, rank(0, 2))


def test_a_decoder_of_another_rank_is_refused(source: ModelSource) -> None:
    model = ModelConfig.from_hf(FIELDS)
    alone = plan_execution(CONFIG, model)
    decoder = read_decoder(source, alone, None)
    with pytest.raises(ConfigError, match="needed by each of 2 ranks"):
        make_runner(decoder, plan_execution(CONFIG, model, rank(0, 2)))


def test_wrong_names_of_gpus_do_not_mean_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(rank_device.Path, "glob", lambda folder, pattern: iter([folder / "nvidia0"]))
    for visible in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert rank_device.device_of("auto", TensorParallel()).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with pytest.raises(ConfigError, match="none of this machine's GPUs with CUDA_VISIBLE_DEVICES='9'"):
        rank_device.device_of("auto", TensorParallel())
    assert rank_device.device_of("cpu", TensorParallel()).type == "cpu"
