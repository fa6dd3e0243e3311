"""The key-value pairs at the head of a GGUF file."""

from collections.abc import Mapping
from struct import Struct
from types import MappingProxyType

import numpy as np

from octavo.models.formats.gguf.cursor import UINT32, UINT64, Cursor

MAX_PAIRS = 2**16
MAX_ARRAY_LENGTH = 2**24
# An inner array takes 12 bytes in the file but far more as an object.
MAX_OUTER_LENGTH = 2**16

_BOOL, _STRING, _ARRAY = 7, 8, 9
# By type id. Source: the GGUF specification.
_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_NUMBERS: Mapping[int, tuple[Struct, np.dtype]] = MappingProxyType(
    {type_id: (Struct(layout), np.dtype(layout)) for type_id, layout in _LAYOUTS.items()}
)
_BYTE, _BYTES = _NUMBERS[0]


def read_metadata(cursor: Cursor, num_pairs: int) -> dict[str, object]:
    """Read key-value pairs.

    Args:
        cursor: at the first key; moved past the last value.
        num_pairs: number of pairs, at most MAX_PAIRS.

    Returns:
        Values by key: int, float, bool or str; arrays of strings as list[str], arrays of numbers as NumPy
        arrays, arrays of arrays as lists of those.

    Raises:
        FileFormatError: a key occurs twice, a type is unknown, a bound is exceeded or the file ends early.
    """
    metadata: dict[str, object] = {}
    for index in range(num_pairs):
        key = cursor.string(f"metadata key {index}")
        if not key or key in metadata:
            raise cursor.error(f"metadata key {index}", "a new name", key)
        metadata[key] = _read_value(cursor, cursor.integer(UINT32, f"the type of {key}", 2**32), key)
    return metadata


def _read_value(cursor: Cursor, type_id: int, what: str) -> object:
    if type_id in _NUMBERS:
        return cursor.number(_NUMBERS[type_id][0], what)
    if type_id == _STRING:
        return cursor.string(what)
    if type_id == _BOOL:
        return bool(cursor.integer(_BYTE, f"{what}, false (0) or true (1),", 1))
    if type_id == _ARRAY:
        return _read_array(cursor, what, is_inner=False)
    raise cursor.error(f"the type of {what}", "a value type from 0 to 12", type_id)


def _read_array(cursor: Cursor, what: str, *, is_inner: bool) -> object:
    type_id = cursor.integer(UINT32, f"the element type of {what}", 2**32)
    count = cursor.integer(UINT64, f"the length of {what}", MAX_ARRAY_LENGTH)
    if type_id in _NUMBERS:
        return cursor.numbers(count, _NUMBERS[type_id][1], what)
    if type_id == _STRING:
        return cursor.strings(count, what)
    if type_id == _BOOL:
        values = cursor.numbers(count, _BYTES, what)
        if values.max(initial=0) > 1:
            raise cursor.error(what, "0 (false) or 1 (true)", int(values.max()))
        return values.astype(np.bool_)
    if type_id != _ARRAY:
        raise cursor.error(f"the element type of {what}", "a value type from 0 to 12", type_id)
    if is_inner:
        raise cursor.error(what, "an array nested at most two deep", "three or more")
    if count > MAX_OUTER_LENGTH:
        raise cursor.error(f"the length of {what}", f"at most {MAX_OUTER_LENGTH} arrays", count)
    return [_read_array(cursor, what, is_inner=True) for _ in range(count)]
