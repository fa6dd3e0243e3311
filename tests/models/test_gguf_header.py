"""The GGUF reader: what it reads, and that no damaged file gets past it with anything but a typed error."""

import contextlib
import struct
from pathlib import Path

import gguf_builder as build
import numpy as np
import pytest
import torch
from gguf_builder import ARRAY, BOOL, STRING, U8, U32, U64, File, Tensor, encode, pair, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import (
    FileFormatError,
    ModelNotFoundError,
    OctavoError,
    UnsupportedModelError,
    WeightsError,
)
from octavo.models.formats.gguf.file import GGUFFile
from octavo.models.formats.gguf.gguf_weights import GGUFWeights
from octavo.models.formats.gguf.hf_config import gguf_to_hf_config

ROW = bytes(16)  # four float32
PLAIN = Tensor("a", (4,), ROW)
ALIGNED_8 = encode("general.alignment", 8)


def opened(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile.open(path)


def one(tensor: Tensor) -> File:
    return File(tensors=[tensor])


def with_pair(kind: int, payload: bytes) -> File:
    return File([pair("k", kind, payload)])


def nested(depth: int) -> bytes:
    inner = build.array(U8, [b"\1"])
    for _ in range(depth - 1):
        inner = build.array(ARRAY, [inner])
    return inner


BAD_FILES = {
    "empty": b"",
    "shorter than a header": b"GGUF" + bytes(19),
    "wrong magic": File(magic=b"GGML").build(),
    "a zip file": b"PK\3\4" + bytes(100),
    "too many tensors": File(num_tensors=2**16 + 1).build(),
    "2**64 - 1 tensors": File(num_tensors=2**64 - 1).build(),
    "too many pairs": File(num_pairs=2**63).build(),
    "fewer pairs than promised": File([encode("k", 1)], num_pairs=2).build(),
    "fewer tensors than promised": File(tensors=[PLAIN], num_tensors=3).build(),
    "key beyond the end": File(num_pairs=1).build()[:24] + struct.pack("<Q", 100) + b"k",
    "key of 2**63 bytes": File(num_pairs=1).build()[:24] + struct.pack("<Q", 2**63) + b"k",
    "key not UTF-8": File([pair(b"\xff\xfe", U32, bytes(4))]).build(),
    "key empty": File([encode("", 1)]).build(),
    "key twice": File([encode("k", 1), encode("k", 2)]).build(),
    "unknown value type": with_pair(13, bytes(8)).build(),
    "value type 2**32 - 1": with_pair(2**32 - 1, bytes(8)).build(),
    "value cut short": File([pair("k", U64, bytes(7))], alignment=1).build(),
    "bool that is neither": with_pair(BOOL, b"\2").build(),
    "bools that are neither": with_pair(ARRAY, build.array(BOOL, [b"\1", b"\7"])).build(),
    "string over 16 MiB": with_pair(STRING, text(b"x" * (2**24 + 1))).build(),
    "string not UTF-8": with_pair(STRING, text(b"caf\xe9")).build(),
    "string array not UTF-8": with_pair(ARRAY, build.array(STRING, [text("a"), text(b"\x80")])).build(),
    "string array cut short": with_pair(ARRAY, build.array(STRING, [text("a")], count=1000)).build(),
    "number array cut short": with_pair(ARRAY, build.array(U32, [bytes(4)], count=1000)).build(),
    "array over 16 M": with_pair(ARRAY, build.array(U8, [], count=2**24 + 1)).build(),
    "array of 2**64 - 1": with_pair(ARRAY, build.array(U64, [], count=2**64 - 1)).build(),
    "array of unknown type": with_pair(ARRAY, build.array(99, [b"1"])).build(),
    "nested too deep": with_pair(ARRAY, nested(3)).build(),
    "nested a thousand deep": with_pair(ARRAY, nested(1000)).build(),
    "too many inner arrays": with_pair(ARRAY, build.array(ARRAY, [], count=2**16 + 1)).build(),
    "alignment 0": File([encode("general.alignment", 0)]).build(),
    "alignment 24": File([encode("general.alignment", 24)]).build(),
    "alignment 2**31": File([encode("general.alignment", 2**31)]).build(),
    "alignment a string": File([encode("general.alignment", "32")]).build(),
    "alignment an array": File([encode("general.alignment", [32])]).build(),
    "tensor name not UTF-8": one(Tensor(b"\xc3", (4,), ROW)).build(),
    "tensor name empty": one(Tensor("", (4,), ROW)).build(),
    "tensor name twice": File(tensors=[PLAIN, PLAIN]).build(),
    "no dimensions": one(Tensor("a", (), ROW)).build(),
    "five dimensions": one(Tensor("a", (1, 1, 1, 1, 4), ROW)).build(),
    "dimension 0": one(Tensor("a", (4, 0), ROW)).build(),
    "dimension 2**64 - 1": one(Tensor("a", (2**64 - 1,), ROW)).build(),
    "product of 2**40": one(Tensor("a", (2**20, 2**20), ROW)).build(),
    "product wraps to 4 in 64 bits": one(Tensor("a", (2**32 + 1, 2**32 + 4), ROW)).build(),
    "unknown element type": one(Tensor("a", (4,), ROW, kind=4)).build(),
    "element type 2**32 - 1": one(Tensor("a", (4,), ROW, kind=2**32 - 1)).build(),
    "row of half a block": one(Tensor("a", (48,), bytes(40), kind=3)).build(),
    "rows of half a block": one(Tensor("a", (16, 2), bytes(20), kind=3)).build(),
    "offset not aligned": one(Tensor("a", (4,), bytes(64), offset=8)).build(),
    "offset beyond the end": one(Tensor("a", (4,), ROW, offset=2**20)).build(),
    "offset 2**64 - 32": one(Tensor("a", (4,), ROW, offset=2**64 - 32)).build(),
    "data cut short": one(PLAIN).build()[:-1],
    "data missing": one(Tensor("a", (4,), b"")).build(),
    "size beyond the end": one(Tensor("a", (2**30,), ROW)).build(),
    "same place twice": File(tensors=[PLAIN, Tensor("b", (4,), b"", offset=0)]).build(),
    "overlap": File(tensors=[Tensor("a", (16,), bytes(64)), Tensor("b", (4,), ROW, offset=32)]).build(),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_a_format_error_that_names_the_file(name, tmp_path):
    with pytest.raises(FileFormatError, match=r"bad\.gguf"):
        opened(tmp_path / "bad.gguf", BAD_FILES[name])


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_other_versions_and_byte_orders_are_not_supported(version, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path / "bad.gguf", File(version=version).build())


def test_a_message_has_the_field_the_value_and_the_bound(tmp_path):
    with pytest.raises(FileFormatError, match=r"number of tensors to be at most 65536, got 65537"):
        opened(tmp_path / "bad.gguf", BAD_FILES["too many tensors"])
    with pytest.raises(FileFormatError, match=r"offset of a to be a multiple of 32, got 8"):
        opened(tmp_path / "bad.gguf", BAD_FILES["offset not aligned"])


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(version, tmp_path):
    numbers = {U8: 200, build.I8: -3, build.U16: 60000, build.I16: -300, U32: 2**32 - 1, build.I32: -(2**31)}
    numbers |= {build.F32: 0.5, U64: 2**64 - 1, build.I64: -(2**63), build.F64: 0.1}
    pairs = [pair(f"n{kind}", kind, build.number(kind, value)) for kind, value in numbers.items()]
    pairs += [
        pair(f"a{kind}", ARRAY, build.array(kind, [build.number(kind, value)] * 3))
        for kind, value in numbers.items()
    ]
    pairs += [encode("yes", True), encode("text", "naïve"), encode("texts", ["", "é", "a b"])]
    pairs += [
        encode("bools", [True, False]),
        pair("nested", ARRAY, nested(2)),
        pair("none", ARRAY, build.array(U8, [])),
    ]
    metadata = opened(tmp_path / "good.gguf", File(pairs, version=version).build()).metadata
    for kind, value in numbers.items():
        assert metadata[f"n{kind}"] == value
        assert metadata[f"a{kind}"].tolist() == [value] * 3  # type: ignore[attr-defined]
    assert metadata["yes"] is True
    assert (metadata["text"], metadata["texts"]) == ("naïve", ["", "é", "a b"])
    assert metadata["bools"].tolist() == [True, False]  # type: ignore[attr-defined]
    assert [inner.tolist() for inner in metadata["nested"]] == [[1]]  # type: ignore[attr-defined]
    assert len(metadata["none"]) == 0  # type: ignore[arg-type]


def test_tensors_lie_where_the_file_says(tmp_path):
    first, second = np.arange(6, dtype="<f4").reshape(2, 3), np.arange(5, dtype="<f4")
    tensors = [Tensor.of("first", first), Tensor.of("second", second)]
    file = opened(tmp_path / "good.gguf", File([ALIGNED_8], tensors, alignment=8).build())
    with file:
        assert file.tensors["first"].shape == (2, 3)
        assert file.raw("first").tobytes() == first.tobytes()
        assert file.raw("second").tobytes() == second.tobytes()
        buffer = np.empty(8, np.uint8)
        file.read_into(file.tensors["second"], 4, buffer)
        assert buffer.view("<f4").tolist() == [1, 2]
        with pytest.raises(WeightsError, match="did you mean 'second'"):
            file.raw("secnd")


def test_a_file_that_changes_while_in_use_is_noticed(tmp_path):
    path = tmp_path / "good.gguf"
    file = opened(path, one(PLAIN).build())
    path.write_bytes(one(PLAIN).build()[:-8])
    with pytest.raises(FileFormatError, match="changed"):
        file.raw("a")
    file = opened(path, one(PLAIN).build())
    file.raw("a")
    with path.open("r+b") as opened_again:
        opened_again.truncate(path.stat().st_size - 8)
    with file, pytest.raises(FileFormatError, match="changed"):
        file.raw("a")


def test_a_missing_file_or_a_folder_is_not_found(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="cannot open"):
            GGUFFile.open(path)


VALID = File(
    [encode(key, value) for key, value in build.metadata_of("llama").items()]
    + [encode("tokenizer.ggml.tokens", ["a", "b"]), encode("tokenizer.ggml.eos_token_id", 1), ALIGNED_8],
    build.tensors_of("llama"),
    alignment=8,
).build()
HEADER_SIZE = VALID.index(np.random.default_rng(0).standard_normal((20, 16)).astype("<f4").tobytes())
mutations = st.lists(st.tuples(st.integers(0, HEADER_SIZE - 1), st.integers(0, 255)), min_size=1, max_size=4)


def use(path: Path) -> None:
    """Everything that reads a file, as loading a model does."""
    with GGUFFile.open(path) as file:
        gguf_to_hf_config(file)
        weights = GGUFWeights(file)
        for name in weights.names():
            weights.read(name, dtype=torch.float32)


def test_the_seed_of_the_mutations_is_valid(tmp_path):
    (tmp_path / "valid.gguf").write_bytes(VALID)
    use(tmp_path / "valid.gguf")


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=mutations, length=st.none() | st.integers(0, len(VALID)))
def test_random_changes_give_typed_errors_or_nothing(changes, length, tmp_path_factory):
    data = bytearray(VALID)
    for position, value in changes:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(data[:length])
    with contextlib.suppress(OctavoError):
        use(path)
