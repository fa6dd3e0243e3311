"""GGUF files: a checked header, and the bytes of tensors on request.

A model may be in several files, as llama.cpp splits them: name-00001-of-00003.gguf and so on.

    first part     all metadata, split.no 0, split.count 3, split.tensors.count of all parts, tensors or none
    other parts    split.no 1, 2, split.count 3, tensors
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from octavo.errors import FileFormatError, ModelNotFoundError
from octavo.models.config_fields import ConfigFields
from octavo.models.formats.gguf.header import MAX_TENSORS, GGUFTensorInfo, read_header
from octavo.models.weights import listed, missing_tensor

# split.no and split.count have 16 bits, but the number in a name has five digits.
_MAX_PARTS = 2**16 - 1
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GGUFPart:
    """One file, opened for reading when it is first needed.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, identity: tuple[int, ...]) -> None:
        """Note where a file lies, and what it was when its header was read."""
        self.path = path
        self._identity = identity
        self._file: FileIO | None = None

    def opened(self) -> FileIO:
        """Return the open file.

        Raises:
            ModelNotFoundError: it cannot be opened any more.
            FileFormatError: it has changed since its header was read.
        """
        if self._file is None:
            file = _open(self.path)
            if _identity(file) != self._identity:
                file.close()
                raise FileFormatError(f"{self.path.name} changed since its header was read; load it again")
            self._file = file
        return self._file

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The headers of all files of a model.

    Attributes:
        metadata: of the first file.
        tensors: of all files, by name.
        parts: the files.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensorInfo]
    parts: Sequence[GGUFPart]


def read_parts(path: Path) -> GGUFHeader:
    """Read the header of a file, and of all others if it is the first of several.

    Raises:
        ModelNotFoundError: a file cannot be opened, it is not the first part, or parts are missing.
        FileFormatError: a file is damaged, or is not the part that its name says.
        UnsupportedModelError: Octavo does not have its version or byte order.
    """
    header = _read_part(path)
    fields = ConfigFields(header.metadata, {}, where=path.name)
    count = fields.integer("split.count", 1, minimum=0, maximum=_MAX_PARTS)
    if count <= 1:
        return header
    paths = _paths(path, fields.integer("split.no", minimum=0, maximum=count - 1), count)
    tensors, parts = dict(header.tensors), list(header.parts)
    for index, other in enumerate(paths[1:], 1):
        part = _read_part(other)
        _check_numbers(part, index, count)
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise FileFormatError(f"{other.name}: tensor {min(twice)} is in another part, too")
        tensors |= {name: replace(info, part=index) for name, info in part.tensors.items()}
        parts += part.parts
    expected = fields.integer("split.tensors.count", len(tensors), minimum=0, maximum=MAX_TENSORS)
    if expected != len(tensors):
        raise FileFormatError(f"{path.name}: expected {expected} tensors in all parts, got {len(tensors)}")
    return GGUFHeader(header.metadata, MappingProxyType(tensors), parts)


def only_model(folder: Path) -> Path | None:
    """Return the one GGUF file in a folder, or the first part of the one model in parts; None: there is none.

    Raises:
        ModelNotFoundError: there are several.
    """
    firsts = {_first_of(path) for path in folder.glob("*.gguf")}
    if len(firsts) > 1:
        names = sorted(path.name for path in firsts)
        raise ModelNotFoundError(
            f"the folder {folder} holds several GGUF models; give one of these files: {listed(names)}"
        )
    return next(iter(firsts), None)


def _first_of(path: Path) -> Path:
    named = _NAME.fullmatch(path.name)
    return path if named is None else path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf")


def _read_part(path: Path) -> GGUFHeader:
    with _open(path) as file:
        return GGUFHeader(*read_header(file, path.name), [GGUFPart(path, _identity(file))])


def _paths(path: Path, number: int, count: int) -> list[Path]:
    """Return the paths of all parts, of which `path` must be the first, beside it."""
    named = _NAME.fullmatch(path.name)
    if named is None or (int(named[2]), int(named[3])) != (number + 1, count):
        raise FileFormatError(
            f"{path.name} is part {number + 1} of {count}, and its name must say so for the others to be "
            f"found: expected a name that ends in -{number + 1:05}-of-{count:05}.gguf"
        )
    if number > 0:
        first = _first_of(path)
        there = "" if first.is_file() else f", which is missing in {path.parent}"
        raise ModelNotFoundError(
            f"{path.name} is part {number + 1} of {count}; give the first part, {first.name}{there}"
        )
    paths = [path.with_name(f"{named[1]}-{index:05}-of-{named[3]}.gguf") for index in range(1, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{path.name} is the first of {count} parts, all of which must be in {path.parent}; "
            f"missing: {listed(missing)}"
        )
    return paths


def _check_numbers(part: GGUFHeader, index: int, count: int) -> None:
    """Refuse a file that is not the part that its name says."""
    fields = ConfigFields(part.metadata, {}, where=part.parts[0].path.name)
    for name, expected in (("split.no", index), ("split.count", count)):
        found = fields.integer(name, minimum=0, maximum=_MAX_PARTS)
        if found != expected:
            raise fields.error(name, str(expected), found)


def _open(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise ModelNotFoundError(f"cannot open the model file {path}: {error.strerror}") from error


def _identity(file: FileIO) -> tuple[int, ...]:
    """Return what changes if the path leads to another file, or the file is written to."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class GGUFFile:
    """One GGUF file, or several of one model, with checked headers. Only one thread at a time may read.

    A file is memory-mapped only while its header is parsed; tensors are read with plain reads. So it never
    counts as memory of this process, and truncating it while in use raises an error instead of a bus fault.

    Attributes:
        path: the file, of several the first.
        metadata: key -> int, float, bool, str, list[str], NumPy array, or a list of arrays.
        tensors: by name, in the order of the files.
    """

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        """Wrap a parsed file; use `open`."""
        self.path = path
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._parts = header.parts

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a file, and the other parts of its model, and check their whole headers.

        Raises:
            ModelNotFoundError: a file cannot be opened, it is not the first part, or parts are missing.
            FileFormatError: it is not a GGUF file, or damaged; names the field, its value and the bound.
            UnsupportedModelError: Octavo does not have its version or byte order.
        """
        return cls(Path(path), read_parts(Path(path)))

    def read_into(self, info: GGUFTensorInfo, start: int, buffer: np.ndarray) -> None:
        """Fill a buffer with bytes of a tensor.

        Args:
            info: of the tensor, or of a part of one that is a tensor by itself.
            start: first byte within the tensor.
            buffer: [n] uint8 contiguous, overwritten; start + n is at most the tensor's size.

        Raises:
            FileFormatError: the file has changed since its header was read.
        """
        part = self._parts[info.part]
        file = part.opened()
        assert 0 <= start <= start + buffer.nbytes <= info.nbytes, f"{info.name}: bytes beyond the tensor"
        file.seek(info.offset + start)
        view = buffer.data
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise FileFormatError(
                    f"{part.path.name}: {info.name} is cut short: the file changed while it was in use"
                )
            view = view[num_read:]

    def raw(self, name: str) -> np.ndarray:
        """Return all bytes of a tensor: [nbytes] uint8, a copy.

        Raises:
            WeightsError: there is no such tensor.
        """
        info = self._info(name)
        buffer = np.empty(info.nbytes, np.uint8)
        self.read_into(info, 0, buffer)
        return buffer

    def close(self) -> None:
        """Close all files. The header stays usable; reading a tensor opens its file again."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self.tensors:
            raise missing_tensor(self.path.name, name, self.tensors)
        return self.tensors[name]
