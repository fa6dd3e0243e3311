"""Reads the JSON and other small files of a model folder, with limits on size and depth."""

import codecs
import json
import os
import stat
from pathlib import Path
from typing import Any, AnyStr, TypeVar

import msgspec

from octavo.errors import FileFormatError

MAX_DEPTH = 64

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read a file that holds one JSON object; NaN and Infinity are allowed, as Python writes them.

    Args:
        path: the file.
        max_bytes: larger files are refused unread.

    Raises:
        FileFormatError: the file cannot be read, is too large, is not a JSON object, nests values more than
            MAX_DEPTH deep, or holds invalid Unicode.
    """
    content = read_file(path, max_bytes)
    try:
        found = json.loads(content)
        if rb"\u" in content:  # it may spell half a surrogate pair, which no UTF-8 can hold
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path}: expected a JSON object, got {type(found).__name__}")
    _check_depth(path, found)
    return found


def read_json_fields(path: Path, kind: type[_Struct], max_bytes: int) -> _Struct:
    """Read some fields of a file that holds one JSON object; a missing file has no fields.

    Args:
        path: the file.
        kind: the fields and their types; other fields are ignored.
        max_bytes: larger files are refused unread.

    Raises:
        FileFormatError: as `read_json_object`, or a field is of another type.
    """
    found = read_json_object(path, max_bytes) if is_present(path) else {}
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{path}: {error}") from error


def is_present(path: Path) -> bool:
    """Return whether anything has that name: a folder or a broken link is an error, not a missing file."""
    return os.path.lexists(path)


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a whole file, without a byte order mark.

    Args:
        path: the file.
        max_bytes: larger files are refused unread.

    Raises:
        FileFormatError: it is not a regular file, cannot be read or is too large.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileFormatError(f"{path}: expected a file, got a folder or a device; put the file there")
        if status.st_size > max_bytes:
            raise FileFormatError(
                f"{path}: expected at most {max_bytes} bytes, got {status.st_size}; "
                "fetch this file of the model again"
            )
        return without_mark(path.read_bytes())
    except OSError as error:
        raise FileFormatError(f"{path}: expected a file that can be read, got: {error}") from error


def without_mark(content: AnyStr) -> AnyStr:
    """Return a text without the byte order mark with which some editors begin a file."""
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    return content.removeprefix(codecs.BOM_UTF8)


def _check_depth(path: Path, found: object) -> None:
    """Refuse nesting that could exhaust the stack of later readers."""
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [entry for values in inner for entry in values if isinstance(entry, dict | list)]
        if not level:
            return
    raise FileFormatError(f"{path}: expected at most {MAX_DEPTH} levels of nesting, got more")
