"""Reads numbers, strings and key-value pairs of an untrusted GGUF file; checks every length before using it.

Sizes are Python integers, so no product or sum overflows. Every count has a limit, so a small file cannot
ask for much memory.
"""

import reprlib
from collections.abc import Mapping
from mmap import mmap
from struct import Struct
from types import MappingProxyType

import numpy as np

from octavo.errors import FileFormatError

MAX_STRING_BYTES = 2**24
UINT32 = Struct("<I")
UINT64 = Struct("<Q")


class Cursor:
    """A position in a file that moves forward, never beyond the end.

    Attributes:
        position: next byte to read.
    """

    def __init__(self, data: mmap, where: str) -> None:
        """Start at byte 0 of a file; `where` is its name, for messages."""
        self.position = 0
        self._data = data
        self._size = len(data)
        self._where = where

    def error(self, what: str, expected: str, got: object) -> FileFormatError:
        """Return the error for a value that is not what was expected."""
        return FileFormatError(f"{self._where}: expected {what} to be {expected}, got {reprlib.repr(got)}")

    def number(self, layout: Struct, what: str) -> int | float:
        """Read one number.

        Raises:
            FileFormatError: the file ends before it.
        """
        return layout.unpack_from(self._data, self._advance(layout.size, what))[0]

    def integer(self, layout: Struct, what: str, maximum: int) -> int:
        """Read an unsigned integer of at most `maximum`.

        Raises:
            FileFormatError: it is larger, or the file ends before it.
        """
        value = self.number(layout, what)
        if value > maximum:
            raise self.error(what, f"at most {maximum}", value)
        return int(value)

    def string(self, what: str) -> str:
        """Read a string: a 64-bit length in bytes, then UTF-8.

        Raises:
            FileFormatError: it is too long, not UTF-8, or the file ends within it.
        """
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings, one after the other; see `string`."""
        # The loop does as little as possible: a vocabulary and its merges are 100,000 strings or more.
        data, end, position, read_length = self._data, self._size, self.position, UINT64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    raise self._too_short(what, position, 8)
                position = start + read_length(data, position)[0]
                if position - start > MAX_STRING_BYTES or position > end:
                    raise self._string_too_long(what, start, position - start)
                found.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise self.error(what, "UTF-8", error.object[error.start : error.end]) from error
        self.position = position
        return found

    def numbers(self, count: int, dtype: np.dtype, what: str) -> np.ndarray:
        """Read `count` numbers into an array [count] of `dtype`, read-only.

        Raises:
            FileFormatError: the file ends before the last one.
        """
        start = self._advance(count * dtype.itemsize, what)
        return np.frombuffer(self._data[start : self.position], dtype)

    def _advance(self, num_bytes: int, what: str) -> int:
        """Move on by `num_bytes`; return where they start."""
        start = self.position
        if num_bytes > self._size - start:
            raise self._too_short(what, start, num_bytes)
        self.position = start + num_bytes
        return start

    def _string_too_long(self, what: str, start: int, length: int) -> FileFormatError:
        if length > MAX_STRING_BYTES:
            return self.error(f"the length of {what}", f"at most {MAX_STRING_BYTES} bytes", length)
        return self._too_short(what, start, length)

    def _too_short(self, what: str, start: int, num_bytes: int) -> FileFormatError:
        return FileFormatError(
            f"{self._where}: {what} takes {num_bytes} bytes from byte {start}, but the file has only "
            f"{self._size} bytes; it is truncated or damaged"
        )


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
