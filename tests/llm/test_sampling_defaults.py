"""The model's own defaults of sampling: they hold where no parameters are given, and nowhere else."""

import json
import re
from pathlib import Path

import pytest
from tiny_model import TINY_LLAMA

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.errors import ModelError

OPTIONS = {"num_blocks": 64, "block_size": 4, "prepare": False, "load_format": "dummy"}
IDS = {"prompt_token_ids": [5, 6, 7]}
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that its makers would run greedily, with a penalty."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps(GREEDY))
    return tmp_path


def ids(llm: LLM, params: SamplingParams | None) -> list[int]:
    return llm.generate([IDS], params)[0].outputs[0].token_ids


def test_they_hold_where_no_parameters_are_given(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    assert llm.get_default_sampling_params() == SamplingParams(**GREEDY)
    own = ids(llm, SamplingParams(**GREEDY))
    assert ids(llm, None) == own == ids(llm, None)
    with llm.stream(IDS) as stream:
        assert [token_id for delta in stream for token_id in delta.token_ids] == own


def test_parameters_that_are_given_are_taken_as_they_are(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    neutral = LLM(str(folder), generation_config="none", **OPTIONS)
    assert neutral.get_default_sampling_params() == SamplingParams()
    for params in (
        SamplingParams(seed=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=4),
    ):
        assert ids(llm, params) == ids(neutral, params)
    assert ids(neutral, SamplingParams(temperature=0)) != ids(llm, None), "the penalty has an effect"


def test_a_folder_may_be_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    llm = LLM(str(folder), generation_config=str(other), **OPTIONS)
    assert llm.get_default_sampling_params() == SamplingParams(top_k=3)


def test_a_wrong_value_names_file_and_key(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_p": "wide"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p: top_p must be a number"):
        LLM(str(folder), **OPTIONS)
    LLM(str(folder), generation_config="none", **OPTIONS)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["inspect", *arguments, "--load-format", "dummy", "--device", "cpu"])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_inspect_says_what_they_are_and_where_they_are_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = inspected(capsys, str(folder))
    assert re.search(r"sampling by default temperature 0, repetition_penalty", shown)
    assert "1.3 (from" in shown
    assert "generation_config is none" in inspected(capsys, str(folder), "--generation-config", "none")
    (folder / "generation_config.json").unlink()
    assert "the model says nothing" in inspected(capsys, str(folder))
