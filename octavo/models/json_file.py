"""JSON files of a model folder, of bounded size."""

import json
from pathlib import Path

from octavo.errors import FileFormatError


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Args:
        path: the file.
        max_bytes: larger files are refused unread.

    Raises:
        FileFormatError: the file cannot be read, is too large, is not JSON or not an object.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise FileFormatError(f"{path}: expected at most {max_bytes} bytes, got more")
        # UnicodeDecodeError and JSONDecodeError are ValueErrors.
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
