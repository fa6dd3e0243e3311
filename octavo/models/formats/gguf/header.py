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
from octavo.models.formats.gguf.cursor import MAX_PAIRS, UINT32, UINT64, Cursor, read_metadata


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One element type.

    Attributes:
        name: such as "Q4_1".
        block_size: numbers per block; a row is a whole number of blocks.
        block_bytes: bytes per block.
    """

    name: str
    block_size: int
    block_bytes: int


# By type id. Source: the GGUF specification.
GGML_TYPES: Mapping[int, GGMLType] = MappingProxyType(
    {
        0: GGMLType("F32", 1, 4),
        1: GGMLType("F16", 1, 2),
        2: GGMLType("Q4_0", 32, 18),
        3: GGMLType("Q4_1", 32, 20),
        6: GGMLType("Q5_0", 32, 22),
        7: GGMLType("Q5_1", 32, 24),
        8: GGMLType("Q8_0", 32, 34),
        9: GGMLType("Q8_1", 32, 36),
        10: GGMLType("Q2_K", 256, 84),
        11: GGMLType("Q3_K", 256, 110),
        12: GGMLType("Q4_K", 256, 144),
        13: GGMLType("Q5_K", 256, 176),
        14: GGMLType("Q6_K", 256, 210),
        15: GGMLType("Q8_K", 256, 292),
        16: GGMLType("IQ2_XXS", 256, 66),
        17: GGMLType("IQ2_XS", 256, 74),
        18: GGMLType("IQ3_XXS", 256, 98),
        19: GGMLType("IQ1_S", 256, 50),
        20: GGMLType("IQ4_NL", 32, 18),
        21: GGMLType("IQ3_S", 256, 110),
        22: GGMLType("IQ2_S", 256, 82),
        23: GGMLType("IQ4_XS", 256, 136),
        24: GGMLType("I8", 1, 1),
        25: GGMLType("I16", 1, 2),
        26: GGMLType("I32", 1, 4),
        27: GGMLType("I64", 1, 8),
        28: GGMLType("F64", 1, 8),
        29: GGMLType("IQ1_M", 256, 56),
        30: GGMLType("BF16", 1, 2),
        34: GGMLType("TQ1_0", 256, 54),
        35: GGMLType("TQ2_0", 256, 66),
        39: GGMLType("MXFP4", 32, 17),
        40: GGMLType("NVFP4", 64, 36),
        41: GGMLType("Q1_0", 128, 18),
    }
)


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
