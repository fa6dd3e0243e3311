"""Folders of safetensors files: whole, in shards, damaged, and of other kinds."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from octavo.errors import (
    FileFormatError,
    ModelNotFoundError,
    OctavoError,
    UnsupportedModelError,
    WeightsError,
)
from octavo.models.formats.safetensors import SafetensorsWeights

INDEX = "model.safetensors.index.json"


def random_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 4, generator=generator),
        "b.weight": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "c.bias": torch.randn(7, generator=generator).to(torch.float16),
    }


def write_shards(folder, weight_map=None):
    tensors = random_tensors()
    save_file({"a.weight": tensors["a.weight"]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in ("b.weight", "c.bias")}, folder / "model-2.safetensors")
    default = dict.fromkeys(tensors, "model-2.safetensors") | {"a.weight": "model-1.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or default}))
    return tensors


@pytest.fixture(params=["whole", "shards"])
def folder(request, tmp_path):
    if request.param == "shards":
        write_shards(tmp_path)
    else:
        save_file(random_tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_and_their_parts(folder, dtype):
    weights = SafetensorsWeights(folder)
    expected = random_tensors()
    assert weights.names() == expected.keys()
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.read(name, dtype=dtype), tensor.to(dtype))
        part = weights.read(name, rows=slice(1, 4), dtype=dtype)
        assert torch.equal(part, tensor[1:4].to(dtype))
    for rows in (None, slice(2, 6)):
        part = weights.read("a.weight", rows=rows, columns=slice(1, 3), dtype=dtype)
        assert part.is_contiguous()
        assert torch.equal(part, expected["a.weight"][rows or slice(None), 1:3].to(dtype))


def test_a_read_tensor_is_free_of_the_file(folder):
    weights = SafetensorsWeights(folder)
    weights.read("a.weight", dtype=torch.float32).zero_()
    kept = weights.read("a.weight", dtype=torch.float32)
    weights.close()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    assert torch.equal(kept, random_tensors()["a.weight"])


def test_a_missing_tensor_is_named_with_its_neighbour(folder):
    with pytest.raises(WeightsError, match=r"no tensor 'a.wieght'.*did you mean 'a.weight'"):
        SafetensorsWeights(folder).read("a.wieght", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn])
def test_other_types_are_refused_by_name(dtype, tmp_path):
    save_file({"x": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'x' has the type (I64|F64|F8_E4M3)"):
        SafetensorsWeights(tmp_path)


def test_a_single_number_is_refused(tmp_path):
    save_file({"x": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="'x' is a single number"):
        SafetensorsWeights(tmp_path)


DATA = save(random_tensors())


def renamed_header(change) -> bytes:
    size = struct.unpack("<Q", DATA[:8])[0]
    header = json.dumps(change(json.loads(DATA[8 : 8 + size]))).encode()
    return struct.pack("<Q", len(header)) + header + DATA[8 + size :]


def outside(header):
    header["a.weight"]["data_offsets"] = [0, 2**40]
    return header


def overlapping(header):
    header["a.weight"]["data_offsets"] = header["c.bias"]["data_offsets"]
    return header


BAD_FILES = {
    "empty": b"",
    "seven bytes": DATA[:7],
    "within the header": DATA[:40],
    "without data": DATA[: 8 + struct.unpack("<Q", DATA[:8])[0]],
    "last byte missing": DATA[:-1],
    "a byte too many": DATA + b"\0",
    "header of 2**63 bytes": struct.pack("<Q", 2**63) + DATA[8:],
    "header not JSON": DATA[:8] + b"x" + DATA[9:],
    "offsets outside": renamed_header(outside),
    "offsets overlap": renamed_header(overlapping),
    "a pickle": b"\x80\x04\x95" + bytes(100),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_a_format_error_that_names_it(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises(FileFormatError, match=r"model\.safetensors is not a complete"):
        SafetensorsWeights(tmp_path)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(position=st.integers(0, 250), value=st.integers(0, 255), length=st.none() | st.integers(0, len(DATA)))
def test_random_changes_give_typed_errors_or_nothing(position, value, length, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    data = bytearray(DATA)
    data[position] = value
    (folder / "model.safetensors").write_bytes(data[:length])
    try:
        weights = SafetensorsWeights(folder)
        for name in weights.names():
            weights.read(name, dtype=torch.float32)
    except OctavoError:
        pass


@pytest.mark.parametrize(
    "file_name",
    [
        "../model-1.safetensors",
        "/etc/passwd",
        "sub/model-1.safetensors",
        "..\\model-1.safetensors",
        "..",
        "x.bin",
        7,
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(file_name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(random_tensors(), tmp_path / "model-1.safetensors")
    write_shards(folder, {"a.weight": file_name})
    with pytest.raises(FileFormatError, match="of the same folder"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "model-3.safetensors"}, "model-3.safetensors is missing, though the index names it"),
        ({"a.weight": "model-1.safetensors", "d": "model-2.safetensors"}, "no tensor 'd'"),
        ({"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}, "has a tensor 'c.bias'"),
        (["a.weight"], "weight_map"),
    ],
)
def test_an_index_and_its_shards_must_agree(weight_map, message, tmp_path):
    write_shards(tmp_path, weight_map)
    with pytest.raises(FileFormatError, match=message):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"weight_map": {}}', b"[" * 100_000])
def test_a_damaged_index_is_a_format_error(content, tmp_path):
    write_shards(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(FileFormatError, match=r"index\.json"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_read(name, tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(UnsupportedModelError, match="can run code"):
        SafetensorsWeights(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"expected model\.safetensors"):
        SafetensorsWeights(tmp_path)
