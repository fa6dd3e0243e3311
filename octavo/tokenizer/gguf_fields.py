"""Typed access to the tokenizer keys of a GGUF file's metadata."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from octavo.errors import FileFormatError

_MISSING = object()


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type. Source: the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFFields:
    """Reads metadata values and refuses those of the wrong type by key.

    Args:
        metadata: the file's key-value pairs.
        name: file name, for error messages.
    """

    def __init__(self, metadata: Mapping[str, object], name: str) -> None:
        self.name = name
        self._metadata = metadata

    def string(self, key: str, default: str | None = None) -> str:
        """A string; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """One of the special ids, None if the file has none; it lies in [0, num_tokens)."""
        key = f"tokenizer.ggml.{key}"
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self._wrong(key, f"a token id below {num_tokens}", value)
        return value

    def strings(self, key: str) -> list[str]:
        """A required array of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(map(str.__instancecheck__, value)):
            raise self._wrong(key, "an array of strings", value)
        return value

    def token_types(self, num_tokens: int) -> list[int]:
        """The type of each token; a file without types has normal tokens only."""
        key = "tokenizer.ggml.token_type"
        if key not in self._metadata:
            return [TokenType.NORMAL] * num_tokens
        return self._numbers(key, num_tokens, "iu").tolist()

    def scores(self, num_tokens: int) -> list[float]:
        """The score of each token, required; the higher one is merged first."""
        return self._numbers("tokenizer.ggml.scores", num_tokens, "f").tolist()

    def _numbers(self, key: str, length: int, kinds: str) -> np.ndarray:
        value = self._get(key, None)
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise self._wrong(key, f"{length} numbers", value) from error
        if array.ndim != 1 or len(array) != length or array.dtype.kind not in kinds:
            raise self._wrong(key, f"{length} numbers, one for each token", value)
        return array

    def _get(self, key: str, default: object) -> object:
        value = self._metadata.get(key, _MISSING)
        if value is _MISSING:
            if default is None:
                raise FileFormatError(f"{self.name}: expected the metadata key {key}, got none")
            return default
        return value

    def _wrong(self, key: str, expected: str, value: object) -> FileFormatError:
        sized = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        got = f"{len(value)} values" if sized else repr(value)  # type: ignore[arg-type]
        return FileFormatError(f"{self.name}: expected {key} to be {expected}, got {got}")
