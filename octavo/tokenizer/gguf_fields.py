"""The tokenizer keys of a GGUF file's metadata, checked."""

from collections.abc import Mapping
from enum import IntEnum

import msgspec
import numpy as np

from octavo.errors import FileFormatError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type. Source: the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFFields(
    msgspec.Struct, kw_only=True, rename=lambda field: None if field == "name" else _PREFIX + field
):
    """The values of tokenizer.ggml.* keys; None where a key is missing.

    Attributes:
        name: file name, for error messages.
        model: kind of vocabulary, "gpt2" or "llama".
        tokens: the piece of each token id.
        pre: the rule that cuts text into words, for byte-level vocabularies.
        token_type: the TokenType of each token id.
        scores: the score of each token id; the pair with the highest score is merged first.
        merges: pairs of pieces, the first to merge first.
        bos_token_id, eos_token_id, eot_token_id, eom_token_id: special ids.
        unknown_token_id, padding_token_id: ids that only chat templates read.
        add_bos_token, add_eos_token: whether encoding adds them.
        add_space_prefix: whether encoding puts a space before the text.
    """

    name: str
    model: str
    tokens: list[str]
    pre: str = "default"
    token_type: list[int] | None = None
    scores: list[float] | None = None
    merges: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    unknown_token_id: int | None = None
    padding_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_space_prefix: bool = True

    @property
    def end_ids(self) -> list[int]:
        """The ids that end an answer: EOS, end of turn, end of message."""
        return [i for i in (self.eos_token_id, self.eot_token_id, self.eom_token_id) if i is not None]

    def error(self, key: str, expected: str, got: object) -> FileFormatError:
        """Return the error for a key whose value is not what was expected."""
        return FileFormatError(f"{self.name}: expected {_PREFIX}{key} to be {expected}, got {got}")


def read_gguf_fields(metadata: Mapping[str, object], name: str) -> GGUFFields:
    """Read the tokenizer keys of a file's metadata.

    Raises:
        FileFormatError: a key is missing, or its value is of the wrong type, length or range.
    """
    values = {key: metadata[key] for key in GGUFFields.__struct_encode_fields__ if key in metadata}
    values = {
        key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()
    }
    try:
        fields = msgspec.convert(values | {"name": name}, GGUFFields)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{name}: {str(error).replace('$.', '')}") from error
    num_tokens = len(fields.tokens)
    for key in ("token_type", "scores"):
        listed = getattr(fields, key)
        if listed is not None and len(listed) != num_tokens:
            raise fields.error(key, f"{num_tokens} numbers, one for each token", f"{len(listed)} values")
    for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"):
        token_id = getattr(fields, key)
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise fields.error(key, f"a token id below {num_tokens}", token_id)
    return fields
