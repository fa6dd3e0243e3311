"""Expert parallelism: two ranks, each with whole experts, give the tokens of one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_checkpoints import TINY as GPT_OSS
from gpt_oss_checkpoints import make_tensors, write_folder
from ranks_helpers import OPTIONS, other_ranks
from test_ranks_experts import PROMPTS, check_ranks, make_llm
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.models import ModelConfig, load_decoder, parameter_shapes
from octavo.models.formats.dummy import DummyWeights
from octavo.parallel import TensorParallel

# Three layers, so that one block of 32 columns of an expert is all that there is to cut.
UNCUTTABLE = GPT_OSS | {"intermediate_size": 32, "num_hidden_layers": 3, "layer_types": None}


def in_processes(folder: Path, **options: Any) -> None:
    """Compare one rank with two processes."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, "expert_parallel": True}):
        llm = LLM(str(folder), **OPTIONS | options, **ranks)
        assert len(other_ranks()) == (1 if ranks else 0)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
        llm.engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_two_processes_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    # Mixtral's experts have 47 columns, which two ranks cannot cut.
    make_llm(tmp_path, family)
    in_processes(tmp_path)


def test_two_processes_share_experts_in_blocks(tmp_path: Path) -> None:
    """Of gpt-oss: sinks, biases that each rank adds for its own experts, and blocks that no rank can cut."""
    write_folder(tmp_path, UNCUTTABLE, make_tensors(UNCUTTABLE))
    in_processes(tmp_path, load_format="auto")


@pytest.mark.parametrize("number", [6, 5, 2])
@pytest.mark.parametrize("family", ["OlmoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_any_number_of_experts(family: str, number: int, tmp_path: Path) -> None:
    """One rank has an expert more if the number is odd, and of two a token takes both."""
    make_llm(tmp_path, family)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"num_experts": number, "num_experts_per_tok": min(number, 3)}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_ranks(LLM(str(tmp_path), **OPTIONS, expert_parallel=True), tmp_path)


@pytest.mark.parametrize("family", ["Qwen2MoeForCausalLM", "Glm4MoeForCausalLM", "Gemma4ForCausalLM"])
def test_whole_experts_beside_one_that_all_tokens_share(family: str, tmp_path: Path) -> None:
    make_llm(tmp_path, family)
    check_ranks(LLM(str(tmp_path), **OPTIONS, expert_parallel=True), tmp_path)


def test_experts_that_cannot_be_cut_are_refused_with_what_helps(tmp_path: Path) -> None:
    write_folder(tmp_path, UNCUTTABLE, make_tensors(UNCUTTABLE))
    with pytest.raises(
        ConfigError, match=r"32 columns of an expert.*, or expert_parallel=True, which cuts no"
    ):
        LLM(str(tmp_path), tensor_parallel_size=2, **OPTIONS | {"load_format": "auto"})


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    fields = GPT_OSS | {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_per_token": 2}
    write_folder(tmp_path, fields, make_tensors(fields))
    with pytest.raises(
        ConfigError, match="4 ranks cannot share the model's 3 experts whole; use fewer ranks"
    ):
        LLM(str(tmp_path), tensor_parallel_size=4, expert_parallel=True, **OPTIONS | {"load_format": "auto"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dense_model_is_refused(tiny_folder: Path, ranks: int) -> None:
    with pytest.raises(ConfigError, match="mixtures of experts, and LlamaForCausalLM is none"):
        LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=ranks, expert_parallel=True)


class Watched(DummyWeights):
    """Dummy weights that note what is read."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(parameter_shapes(config))
        self.read_names: list[str] = []

    def read(self, name: str, **options: Any) -> Tensor:
        self.read_names.append(name)
        return super().read(name, **options)


def test_a_rank_reads_only_its_experts(tmp_path: Path) -> None:
    make_llm(tmp_path, "MixtralForCausalLM")
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    weights, progress = Watched(config), []
    load_decoder(
        config,
        weights,
        dtype=torch.float32,
        device="cpu",
        parallel=TensorParallel.not_met(1, 2),
        expert_parallel=True,
        progress=lambda done, total: progress.append((done, total)),
    )
    read = {name.split(".experts.")[1][0] for name in weights.read_names if ".experts." in name}
    assert read == {"3", "4", "5"}
    assert progress[-1] == (len(weights.read_names),) * 2


def test_inspect_plans_whole_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_llm(tmp_path, "MixtralForCausalLM")
    options = ("--load-format", "dummy", "--device", "cpu", "--num-blocks", "64", "-tp", "2")
    main(["inspect", str(tmp_path), *options, "--expert-parallel"])
    assert "3 of 6, whole" in capsys.readouterr().out
