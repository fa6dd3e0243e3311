"""Reads the header of one GGUF file: its metadata, and where its tensors lie.

    magic, version | counts | key-value pairs | tensor infos | padding | tensor data
                                                             ^ position  ^ data start, aligned

Source: the GGUF specification, versions 2 and 3, little-endian.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import FileIO
from mmap import ACCESS_READ, mmap
from types import MappingProxyType

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.models.formats.gguf.cursor import UINT32, UINT64, Cursor
from octavo.models.formats.gguf.metadata import MAX_PAIRS, read_metadata
from octavo.models.formats.gguf.types import GGML_TYPES, GGMLType

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
        part: of a model in several files, the index of that file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int
    part: int = 0


def read_header(file: FileIO, where: str) -> tuple[Mapping[str, object], Mapping[str, GGUFTensorInfo]]:
    """Return a file's metadata and its tensors by name, in the file's order; `where` is its name.

    Raises:
        FileFormatError: it is not a GGUF file, or damaged; names the field, its value and the bound.
        UnsupportedModelError: Octavo does not have its version or byte order.
    """
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
