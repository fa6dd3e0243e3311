"""Models in several GGUF files: opened from the first, as llama.cpp and the gguf package write them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_builder as build
import numpy as np
import pytest
import torch
from gguf_builder import U16, metadata_of, number, pair, tensors_of
from gguf_cases import values

from octavo import LLM, SamplingParams
from octavo.errors import FileFormatError, ModelNotFoundError, OctavoError
from octavo.models import resolve_model
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights

COUNT = 3


def name_of(index: int, count: int = COUNT) -> str:
    return f"tiny-{index + 1:05}-of-{count:05}.gguf"


def write_parts(folder: Path, change: Any = None, *, empty_first: bool = False) -> Path:
    """Write a model as three files; `change` may edit the metadata and tensors of each."""
    tensors = tensors_of("llama")
    start = 0 if empty_first else 7
    shares = [tensors[:start], tensors[start:12], tensors[12:]]
    for index, share in enumerate(shares):
        own = {"split.no": index, "split.count": COUNT, "split.tensors.count": len(tensors)}
        metadata = (metadata_of("llama") if index == 0 else {}) | own
        if change is not None:
            share = change(index, metadata, share) or share
        build.write(folder / name_of(index), metadata, share)
    return folder / name_of(0)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    (tmp_path / "whole").mkdir()
    return build.write(tmp_path / "whole" / "tiny.gguf", metadata_of("llama"), tensors_of("llama"))


def generated(model: Path) -> list[int]:
    llm = LLM(str(model), device="cpu", num_blocks=16, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_model_in_parts_is_the_model_in_one(tmp_path: Path, whole: Path, empty_first: bool) -> None:
    """The first part may hold nothing but metadata."""
    first = write_parts(tmp_path, empty_first=empty_first)
    parts, one = GGUFFile.open(first), GGUFFile.open(whole)
    assert list(parts.tensors) == list(one.tensors)
    weights, expected = GGUFWeights(parts), GGUFWeights(one)
    for name in expected.names():
        assert torch.equal(weights.read(name, dtype=torch.float32), expected.read(name, dtype=torch.float32))
    weights.close()
    # Files are opened again after they were closed.
    assert torch.equal(
        torch.from_numpy(parts.raw("output_norm.weight").view("<f4")),
        values(tensors_of("llama"), "output_norm.weight"),
    )
    parts.close()
    expected.close()
    assert generated(first) == generated(whole)


def test_parts_of_the_gguf_package_open(tmp_path: Path, whole: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama", split_max_tensors=6)
    for key, value in metadata_of("llama").items():
        if not key.startswith("general."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for tensor in tensors_of("llama"):
        shape = tuple(reversed(tensor.dimensions))
        writer.add_tensor(tensor.name, np.frombuffer(tensor.data, "<f4").reshape(shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert found == [name_of(index, 4) for index in range(4)]
    assert generated(tmp_path / found[0]) == generated(whole)
    assert generated(tmp_path) == generated(whole)


def test_numbers_of_16_bits_as_written_by_llama_cpp(tmp_path: Path) -> None:
    for index, tensors in enumerate((tensors_of("llama")[:9], tensors_of("llama")[9:])):
        pairs = [pair("split.no", U16, number(U16, index)), pair("split.count", U16, number(U16, 2))]
        if index == 0:
            pairs += [build.encode(key, value) for key, value in metadata_of("llama").items()]
        (tmp_path / name_of(index, 2)).write_bytes(build.File(pairs, tensors).build())
    with GGUFFile.open(tmp_path / name_of(0, 2)) as file:
        assert len(file.tensors) == len(tensors_of("llama"))


@pytest.mark.parametrize("index", [1, 2])
def test_another_part_says_which_is_the_first(tmp_path: Path, index: int) -> None:
    first = write_parts(tmp_path)
    with pytest.raises(
        ModelNotFoundError, match=f"is part {index + 1} of 3; give the first part, {first.name}$"
    ):
        resolve_model(str(tmp_path / name_of(index)))
    first.unlink()
    with pytest.raises(ModelNotFoundError, match=f"{first.name}, which is missing in {tmp_path}"):
        resolve_model(str(tmp_path / name_of(index)))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = write_parts(tmp_path)
    (tmp_path / name_of(1)).unlink()
    for given in (first, tmp_path):
        with pytest.raises(ModelNotFoundError, match=rf"all of which must be in .*; missing: {name_of(1)}$"):
            LLM(str(given))
    (tmp_path / name_of(2)).unlink()
    with pytest.raises(ModelNotFoundError, match=f"missing: {name_of(1)}, {name_of(2)}$"):
        resolve_model(str(first))


def test_a_folder_of_parts_is_one_model(tmp_path: Path, whole: Path) -> None:
    write_parts(tmp_path)
    assert resolve_model(str(tmp_path)).path == tmp_path / name_of(0)
    (tmp_path / name_of(0)).unlink()
    with pytest.raises(ModelNotFoundError, match=name_of(0)):
        resolve_model(str(tmp_path))
    assert resolve_model(str(whole.parent)).path == whole
    shutil.copy(whole, whole.parent / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF models; give .*other\.gguf, tiny\.gguf"):
        resolve_model(str(whole.parent))


def test_links_of_the_hubs_cache_lead_to_all_parts(tmp_path: Path) -> None:
    """There the names are links to files with other names, in another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_parts(blobs)
    for index in range(COUNT):
        (blobs / name_of(index)).rename(blobs / str(index))
        (snapshot / name_of(index)).symlink_to(blobs / str(index))
    assert len(GGUFFile.open(snapshot / name_of(0)).tensors) == len(tensors_of("llama"))


def swap_number(index: int, metadata: dict[str, object], share: list[Any]) -> None:
    metadata["split.no"] = {0: 0, 1: 2, 2: 1}[index]


def other_count(index: int, metadata: dict[str, object], share: list[Any]) -> None:
    metadata["split.count"] = 3 + (index == 2)


def no_number(index: int, metadata: dict[str, object], share: list[Any]) -> None:
    if index == 1:
        del metadata["split.no"]


def twice(index: int, metadata: dict[str, object], share: list[Any]) -> list[Any]:
    return share + (tensors_of("llama")[:1] if index == 2 else [])


def lost(index: int, metadata: dict[str, object], share: list[Any]) -> list[Any]:
    return share[1:] if index == 2 else share


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_number, r"tiny-00002-of-00003\.gguf.*split\.no must be 1, got 2"),
        (other_count, r"tiny-00003-of-00003\.gguf.*split\.count must be 3, got 4"),
        (no_number, r"tiny-00002-of-00003\.gguf.*split\.no is missing"),
        (twice, r"tiny-00003-of-00003\.gguf: tensor token_embd\.weight is in another part, too"),
        (lost, r"expected 20 tensors in all parts, got 19"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    first = write_parts(tmp_path, change)
    with pytest.raises(FileFormatError, match=message):
        resolve_model(str(first))


@pytest.mark.parametrize("name", ["model.gguf", "tiny-1-of-3.gguf", "tiny-00002-of-00003.gguf"])
def test_a_part_whose_name_does_not_say_so_is_refused(tmp_path: Path, name: str) -> None:
    first = write_parts(tmp_path)
    first.rename(tmp_path / name)
    with pytest.raises(
        FileFormatError, match=r"is part 1 of 3.*expected a name that ends in -00001-of-00003"
    ):
        resolve_model(str(tmp_path / name))


@pytest.mark.parametrize("value", [-1, 2**16, 1.5, "3", True])
def test_malformed_numbers_of_parts_are_refused(tmp_path: Path, value: object) -> None:
    def change(index: int, metadata: dict[str, object], share: list[Any]) -> None:
        metadata["split.count"] = value

    if value == -1:
        data = build.File([pair("split.count", build.I32, number(build.I32, -1))]).build()
        (tmp_path / name_of(0)).write_bytes(data)
    else:
        write_parts(tmp_path, change)
    with pytest.raises(OctavoError, match=r"split\.count must be"):
        resolve_model(str(tmp_path / name_of(0)))


def test_a_changed_part_is_named(tmp_path: Path) -> None:
    file = GGUFFile.open(write_parts(tmp_path))
    other = tmp_path / name_of(1)
    other.write_bytes(other.read_bytes() + b"x")
    with pytest.raises(FileFormatError, match=f"{name_of(1)} changed since"):
        file.raw(next(info.name for info in file.tensors.values() if info.part == 1))


def test_the_command_line_opens_parts(tmp_path: Path) -> None:
    first = write_parts(tmp_path)
    command = [sys.executable, "-m", "octavo", "inspect", "--device", "cpu"]
    done = subprocess.run([*command, str(first)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*command, str(tmp_path / name_of(1))], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"give the first part, {name_of(0)}" in done.stderr
