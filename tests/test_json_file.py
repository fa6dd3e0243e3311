"""Every small file of a model folder is bounded: whatever it holds, what is wrong has a type and a name."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.errors import FileFormatError, ModelNotFoundError
from octavo.json_file import MAX_DEPTH, read_json_object
from octavo.models.formats.safetensors import SafetensorsWeights
from octavo.models.source import load_tokenizer, read_config, resolve_model

READERS = {
    "config.json": lambda folder: read_config(resolve_model(str(folder))),
    "tokenizer.json": lambda folder: load_tokenizer(resolve_model(str(folder))),
    "tokenizer_config.json": lambda folder: load_tokenizer(resolve_model(str(folder))),
    "special_tokens_map.json": lambda folder: load_tokenizer(resolve_model(str(folder))),
    "generation_config.json": lambda folder: load_tokenizer(resolve_model(str(folder))),
    "model.safetensors.index.json": lambda folder: SafetensorsWeights(folder),
}
TEMPLATE = "chat_template.jinja"
every_json_file = pytest.mark.parametrize("name", list(READERS))
every_file = pytest.mark.parametrize("name", [*READERS, TEMPLATE])


@pytest.fixture
def folder(tmp_path):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def read(folder: Path, name: str) -> object:
    return READERS.get(name, READERS["tokenizer.json"])(folder)


def check_refused(folder: Path, name: str, content: bytes, said: str = "") -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(FileFormatError, match=f"{name}.*{said}"):
        read(folder, name)


@every_json_file
@pytest.mark.parametrize(
    "opening", [b"[", b'{"a":', b'{"chat_template":{"weight_map":', b'{"eos_token_id":[']
)
def test_deep_nesting(folder, name, opening):
    check_refused(folder, name, opening * 50_000)
    closing = b"".join({b"[": b"]", b"{": b"}"}[bytes([c])] for c in reversed(opening) if c in b"[{")
    check_refused(folder, name, opening * 50_000 + b"0" + closing * 50_000)


@every_json_file
@pytest.mark.parametrize(
    "content", [b"", b"{", b"nonsense", b'{"a": "\xff"}', b"\xff\xfe\x00", b'{"a": "\\ud800"}']
)
def test_damage(folder, name, content):
    check_refused(folder, name, content)


def test_a_template_that_is_no_utf8(folder):
    check_refused(folder, TEMPLATE, b"{{ '\xff' }}", "UTF-8")


@every_file
def test_too_many_bytes(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(2**30)  # takes no room on the disk
    with pytest.raises(FileFormatError, match=f"{name}: expected at most .* got {2**30}"):
        read(folder, name)


@every_file
def test_a_folder_or_a_broken_link_is_not_a_missing_file(folder, name):
    path = folder / name
    expected = ModelNotFoundError if name == "config.json" else FileFormatError
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(expected, match=name.replace(".", r"\.")):
        read(folder, name)
    path.rmdir()
    path.symlink_to("nowhere")
    with pytest.raises(expected, match=name.replace(".", r"\.")):
        read(folder, name)


@every_file
def test_a_device_or_a_pipe_is_not_read(folder, name):
    path = folder / name
    expected = ModelNotFoundError if name == "config.json" else FileFormatError
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(expected, match=name.replace(".", r"\.")):
        read(folder, name)


@every_file
def test_a_file_that_cannot_be_read(folder, name, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (folder / name).touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FileFormatError, match="Permission denied"):
        read(folder, name)


def test_the_mark_of_utf8_is_no_text(folder):
    mark = b"\xef\xbb\xbf"
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for path in folder.iterdir():
        path.write_bytes(mark + path.read_bytes())
    assert read_config(resolve_model(str(folder))) == {"model_type": "llama"}
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.chat_template.source == "{{ messages[0].content }}"


def test_numbers_as_python_writes_them(folder):
    (folder / "config.json").write_text('{"eos_token_id": 3, "limits": [-Infinity, NaN]}')
    assert read_config(resolve_model(str(folder)))["limits"][0] == float("-inf")
    assert load_tokenizer(resolve_model(str(folder))).eos_token_ids == {3}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_nesting_up_to_the_limit(tmp_path, opening, closing):
    path = tmp_path / "a.json"

    def write(depth: int) -> None:
        inner = depth - 1
        path.write_text('{"x": ' + opening * inner + "1" + closing * inner + "}")

    write(MAX_DEPTH)
    assert read_json_object(path, 10**6) == json.loads(path.read_text())
    write(MAX_DEPTH + 1)
    with pytest.raises(FileFormatError, match="levels of nesting"):
        read_json_object(path, 10**6)
