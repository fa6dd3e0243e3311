"""Defaults of sampling that a model brings: its folder's, a GGUF file's, another folder's, none."""

import json
from pathlib import Path

import gguf_builder as build
import pytest

from octavo import SamplingParams
from octavo.errors import ConfigError, FileFormatError
from octavo.models import ModelSource, SamplingDefaults, read_sampling_defaults

FIELDS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def folder_with(path: Path, content: object) -> ModelSource:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelSource("folder", path)


def test_a_folders_file_is_read(tmp_path: Path) -> None:
    source = folder_with(
        tmp_path, {**FIELDS, "do_sample": False, "max_new_tokens": 9, "eos_token_id": [1, 2]}
    )
    found = read_sampling_defaults(source)
    assert found == SamplingDefaults(FIELDS, tmp_path / "generation_config.json")
    assert found.params(top_k=0, max_tokens=3) == SamplingParams(**{**FIELDS, "top_k": 0, "max_tokens": 3})
    assert read_sampling_defaults(source, "none") == SamplingDefaults()


@pytest.mark.parametrize("content", [{}, {"do_sample": True}, dict.fromkeys(FIELDS)])
def test_a_file_that_says_nothing_is_as_no_file(tmp_path: Path, content: dict) -> None:
    assert read_sampling_defaults(folder_with(tmp_path, content)) == SamplingDefaults()
    (tmp_path / "generation_config.json").unlink()
    assert read_sampling_defaults(ModelSource("folder", tmp_path)) == SamplingDefaults()


@pytest.mark.parametrize("value", [-1, 0, 1, 50])
def test_every_top_k_of_sampling_is_taken(tmp_path: Path, value: int) -> None:
    assert read_sampling_defaults(folder_with(tmp_path, {"top_k": value})).values == {"top_k": value}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", '"hot"'),
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-1"),
        ("temperature", "true"),
        ("temperature", "[0.5]"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("min_p", "2"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "{}"),
    ],
)
def test_a_value_that_sampling_does_not_take_is_named_with_its_file(
    tmp_path: Path, name: str, text: str
) -> None:
    source = folder_with(tmp_path, f'{{"{name}": {text}}}')
    with pytest.raises(FileFormatError, match=rf"generation_config.json: {name}: {name} must be") as caught:
        read_sampling_defaults(source)
    assert "generation_config to none" in str(caught.value)
    assert read_sampling_defaults(source, "none") == SamplingDefaults()


@pytest.mark.parametrize("content", ["[]", "{", '"a"'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(FileFormatError, match=r"generation_config\.json"):
        read_sampling_defaults(folder_with(tmp_path, content))


def test_another_folder_comes_instead(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "own", FIELDS)
    other = folder_with(tmp_path / "other", {"temperature": 0.1}).path
    assert read_sampling_defaults(source, str(other)).values == {"temperature": 0.1}
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match='must be "auto", "none" or a folder'):
            read_sampling_defaults(source, str(wrong))


def test_a_gguf_files_metadata_is_read(tmp_path: Path) -> None:
    from octavo.models import resolve_model

    sampling = {"temp": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "penalty_repeat": 1.5}
    metadata = build.metadata_of("llama") | {f"general.sampling.{key}": v for key, v in sampling.items()}
    source = resolve_model(str(build.write(tmp_path / "a.gguf", metadata, build.tensors_of("llama"))))
    values = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}
    assert read_sampling_defaults(source) == SamplingDefaults(values, tmp_path / "a.gguf")
    assert read_sampling_defaults(source, "none") == SamplingDefaults()
    wrong = metadata | {"general.sampling.temp": "hot"}
    source = resolve_model(str(build.write(tmp_path / "b.gguf", wrong, build.tensors_of("llama"))))
    with pytest.raises(FileFormatError, match=r"b\.gguf: general.sampling.temp: temperature must be"):
        read_sampling_defaults(source)
