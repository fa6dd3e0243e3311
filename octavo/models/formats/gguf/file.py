"""Reads GGUF files: checks the header, and returns the bytes of tensors on request.

    magic, version | counts | key-value pairs | tensor infos | padding | tensor data
                                                             ^ position  ^ data start, aligned

Source: the GGUF specification, versions 2 and 3, little-endian.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from octavo.errors import FileFormatError, ModelNotFoundError, UnsupportedModelError
from octavo.models.formats.gguf.cursor import UINT32, UINT64, Cursor
from octavo.models.formats.gguf.metadata import MAX_PAIRS, read_metadata
from octavo.models.formats.gguf.types import GGML_TYPES, GGMLType
from octavo.models.weights import missing_tensor

MAX_TENSORS = 2**16
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**40

_MAGIC = int.from_bytes(b"GGUF", "little")
_VERSIONS = (2, 3)
_SMALLEST_BYTES = 24
_DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = tuple(2**exponent for exponent in range(3, 17))


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies in a file.

    Attributes:
        name: as in the file, such as "blk.0.attn_q.weight".
        shape: outermost dimension first, the reverse of the order in the file.
        type: of its elements.
        offset: of its first byte in the file.
        nbytes: its size in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file with a checked header. Only one thread at a time may read from it.

    The file is memory-mapped only while the header is parsed; tensors are read with plain reads. So the file
    never counts as memory of this process, and truncating it while in use raises an error instead of a bus
    fault.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, list[str], NumPy array, or a list of arrays.
        tensors: by name, in the file's order.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, object],
        tensors: Mapping[str, GGUFTensorInfo],
        identity: tuple[int, ...],
    ) -> None:
        """Wrap a parsed file; use `open`."""
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._identity = identity
        self._file: FileIO | None = None

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a file and check its whole header.

        Raises:
            ModelNotFoundError: the file cannot be opened.
            FileFormatError: it is not a GGUF file, or damaged; names the field, its value and the bound.
            UnsupportedModelError: Octavo does not have its version or byte order.
        """
        path = Path(path)
        with _open(path) as file:
            metadata, tensors = _parse(file, path.name)
            return cls(path, metadata, tensors, _identity(file))

    def read_into(self, info: GGUFTensorInfo, start: int, buffer: np.ndarray) -> None:
        """Fill a buffer with bytes of a tensor.

        Args:
            info: of the tensor, or of a part of one that is a tensor by itself.
            start: first byte within the tensor.
            buffer: [n] uint8 contiguous, overwritten; start + n is at most the tensor's size.

        Raises:
            FileFormatError: the file has changed since its header was read.
        """
        file = self._opened()
        assert 0 <= start <= start + buffer.nbytes <= info.nbytes, f"{info.name}: bytes beyond the tensor"
        file.seek(info.offset + start)
        view = buffer.data
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise FileFormatError(
                    f"{self.path.name}: {info.name} is cut short: the file changed while it was in use"
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
        """Close the file. The header stays usable; reading a tensor opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _opened(self) -> FileIO:
        if self._file is None:
            file = _open(self.path)
            if _identity(file) != self._identity:
                file.close()
                raise FileFormatError(f"{self.path.name} changed since its header was read; load it again")
            self._file = file
        return self._file

    def _info(self, name: str) -> GGUFTensorInfo:
        if name not in self.tensors:
            raise missing_tensor(self.path.name, name, self.tensors)
        return self.tensors[name]


def _open(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise ModelNotFoundError(f"cannot open the model file {path}: {error.strerror}") from error


def _identity(file: FileIO) -> tuple[int, ...]:
    """Return what changes if the path leads to another file, or the file is written to."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _parse(file: FileIO, where: str) -> tuple[Mapping[str, object], Mapping[str, GGUFTensorInfo]]:
    size = file.seek(0, 2)
    if size < _SMALLEST_BYTES:
        raise FileFormatError(
            f"{where}: expected a GGUF file of at least {_SMALLEST_BYTES} bytes, got {size} bytes"
        )
    with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        cursor = Cursor(data, where)
        _check_version(cursor, where)
        num_tensors = cursor.integer(UINT64, "the number of tensors", MAX_TENSORS)
        num_pairs = cursor.integer(UINT64, "the number of metadata pairs", MAX_PAIRS)
        metadata = read_metadata(cursor, num_pairs)
        infos = _read_infos(cursor, num_tensors)
    tensors = _placed(cursor, infos, _alignment(cursor, metadata), size)
    return MappingProxyType(metadata), MappingProxyType(tensors)


def _check_version(cursor: Cursor, where: str) -> None:
    magic = cursor.integer(UINT32, "the magic number", 2**32)
    if magic != _MAGIC:
        raise cursor.error("the first four bytes", f"{b'GGUF'!r}", magic.to_bytes(4, "little"))
    version = cursor.integer(UINT32, "the version", 2**32)
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian GGUF" if swapped in _VERSIONS else f"GGUF version {version}"
        raise UnsupportedModelError(
            f"{where}: {kind} is not supported, only versions 2 and 3, little-endian; convert the model again"
        )


def _alignment(cursor: Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
        raise cursor.error("general.alignment", f"a power of two in [8, {_ALIGNMENTS[-1]}]", alignment)
    return alignment


def _read_infos(cursor: Cursor, num_tensors: int) -> dict[str, GGUFTensorInfo]:
    """Return tensor infos by name, with offsets from the start of the data."""
    infos: dict[str, GGUFTensorInfo] = {}
    for index in range(num_tensors):
        info = _read_info(cursor, index)
        if not info.name or info.name in infos:
            raise cursor.error(f"the name of tensor {index}", "a new name", info.name)
        infos[info.name] = info
    return infos


def _read_info(cursor: Cursor, index: int) -> GGUFTensorInfo:
    name = cursor.string(f"the name of tensor {index}")
    num_dimensions = cursor.integer(UINT32, f"the number of dimensions of {name}", MAX_DIMENSIONS)
    what = f"the shape of {name}"
    dimensions = [cursor.integer(UINT64, what, MAX_ELEMENTS - 1) for _ in range(num_dimensions)]
    num_elements = math.prod(dimensions)
    if not dimensions or num_elements == 0 or num_elements >= MAX_ELEMENTS:
        raise cursor.error(what, f"1 to {MAX_DIMENSIONS} sizes, each >= 1, product below 2**40", dimensions)
    type_id = cursor.integer(UINT32, f"the type of {name}", 2**32)
    if type_id not in GGML_TYPES:
        raise cursor.error(f"the type of {name}", "a known element type", type_id)
    kind = GGML_TYPES[type_id]
    if dimensions[0] % kind.block_size:
        raise cursor.error(
            f"a row of {name}", f"a multiple of {kind.block_size} ({kind.name})", dimensions[0]
        )
    nbytes = num_elements // kind.block_size * kind.block_bytes
    offset = cursor.integer(UINT64, f"the offset of {name}", 2**64)
    return GGUFTensorInfo(name, tuple(reversed(dimensions)), kind, offset, nbytes)


def _placed(
    cursor: Cursor, infos: Mapping[str, GGUFTensorInfo], alignment: int, size: int
) -> dict[str, GGUFTensorInfo]:
    """Return infos with absolute offsets; tensors must be aligned, disjoint and within the file."""
    data_start = -(-cursor.position // alignment) * alignment
    end, previous = data_start, "the header"
    for info in sorted(infos.values(), key=lambda info: info.offset):
        start = data_start + info.offset
        if info.offset % alignment:
            raise cursor.error(f"the offset of {info.name}", f"a multiple of {alignment}", info.offset)
        if start < end:
            raise cursor.error(f"{info.name}", f"after {previous}, which ends at byte {end}", start)
        end, previous = start + info.nbytes, info.name
        if end > size:
            raise cursor.error(f"the end of {info.name}", f"within the {size} bytes of the file", end)
    return {name: replace(info, offset=data_start + info.offset) for name, info in infos.items()}
