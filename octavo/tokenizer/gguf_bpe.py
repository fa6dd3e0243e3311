"""Builds BPE vocabularies, byte-level and SentencePiece's, from the tokenizer keys of GGUF metadata."""

import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.decoding import BYTE_PIECE, SPACE_MARK

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
# How text is cut into words before merges, as in the models' own tokenizer.json files. The two differ in how
# many digits form one word.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# Words begin where lower-case letters are followed by upper-case ones, and keep their contractions.
_LARGE, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]*[{_SMALL}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]+[{_SMALL}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The same without contractions, and each digit is a word.
TEKKEN_WORDS = GPT4O_WORDS.replace(_CONTRACTION, "").replace(r"\p{N}{1,3}", r"\p{N}")
# The cuts that llama.cpp makes, one after the other, for files that name no rule.
_DEFAULT_CUTS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)

# Rules of GGUF files with which encoding adds BOS, unless the file says otherwise.
BOS_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
# Vocabularies that hold whole words, which need no merges.
_WHOLE_WORDS = BOS_NAMES | {"gpt-4o"}
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_WORDS),
    **{"gpt-4o": GPT4O_WORDS, "tekken": TEKKEN_WORDS},
}
_GPT2_NAMES = frozenset({"gpt-2", "olmo", "a.x-4.0", "mellum"})
PRE_TOKENIZERS = frozenset({"default", "smollm", *_GPT2_NAMES, *_WORDS})


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
        model: kind of vocabulary, "gpt2", "llama" or "gemma4".
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


def build_byte_level(fields: GGUFFields) -> Tokenizer:
    """Build a byte-level BPE tokenizer.

    Raises:
        FileFormatError: a piece occurs twice, merges are missing, or a merge is malformed or names an unknown
            piece.
        UnsupportedModelError: Octavo does not have the pre-tokenizer.
    """
    if fields.pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{fields.name}: expected tokenizer.ggml.pre to be one of {sorted(PRE_TOKENIZERS)}, "
            f"got {fields.pre!r}"
        )
    if fields.pre == "default":
        logger.warning(
            "%s does not say how its model cut text into words (tokenizer.ggml.pre); it is cut as llama.cpp "
            "does, and answers may be worse; convert the model again",
            fields.name,
        )
    vocabulary = unique_pieces(fields.tokens, fields.name)
    # Llama 3 vocabularies hold whole words that no chain of merges reaches.
    tokenizer = _merging(fields, vocabulary, _merges(fields), ignore_merges=fields.pre in _WHOLE_WORDS)
    if fields.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merging(
    fields: GGUFFields, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the tokenizers package raises plain Exception
        raise FileFormatError(f"{fields.name}: tokenizer.ggml.merges: {error}") from error


def _pre_tokenizer(name: str) -> PreTokenizer:
    cuts = _DEFAULT_CUTS if name == "default" else (_WORDS[name],) if name in _WORDS else ()
    if cuts:
        words = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*words, byte_level])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def unique_pieces(pieces: list[str], name: str) -> dict[str, int]:
    """Return the token id of each piece.

    Raises:
        FileFormatError: a piece occurs twice.
    """
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        twice = next(piece for token_id, piece in enumerate(pieces) if vocabulary[piece] != token_id)
        raise FileFormatError(f"{name}: expected tokenizer.ggml.tokens to differ, got {twice!r} twice")
    return vocabulary


def _merges(fields: GGUFFields) -> list[tuple[str, str]]:
    """Return the merges as pairs; the file writes each as two pieces with a space between."""
    if fields.merges is None:
        raise FileFormatError(f"{fields.name}: expected the metadata key tokenizer.ggml.merges, got none")
    merges: list[tuple[str, str]] = []
    for merge in fields.merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise FileFormatError(f"{fields.name}: expected a merge as two pieces, got {merge!r}")
        merges.append((left, right))
    return merges


def build_sentencepiece(fields: GGUFFields, types: list[int]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback.

    A "▁" stands for a space. Unless tokenizer.ggml.add_space_prefix is false (Gemma), encoding puts a space
    before each stretch of text between special tokens, and decoding removes the first one again. Gemma 4's
    vocabulary has merges of its own, and never such a space.

    Args:
        fields: the file's metadata.
        types: the TokenType of each token id.

    Raises:
        FileFormatError: a piece occurs twice, or scores or bytes are missing.
    """
    pieces, scores, is_gemma4 = fields.tokens, fields.scores, fields.model == "gemma4"
    vocabulary = unique_pieces(_raw_user_defined(pieces, types), fields.name)
    _check_bytes(fields, types)
    unknown = next((pieces[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    if is_gemma4:
        merges = _merges(fields)
    elif scores is None:
        raise FileFormatError(f"{fields.name}: expected the metadata key tokenizer.ggml.scores, got none")
    else:
        merges = merges_from_scores(
            {pieces[i]: scores[i] for i, kind in enumerate(types) if kind == TokenType.NORMAL}
        )
    tokenizer = _merging(fields, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    has_prefix = fields.add_space_prefix and not is_gemma4
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return merges, the first to apply first, that build the same tokens as scores do.

    SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score.
    So every way to cut a piece into two others becomes a merge, ranked by the piece's score.

    Source: Kudo and Richardson, SentencePiece, 2018, section 3.1.
    """
    ranked: list[tuple[float, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((score, left, right))
    ranked.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in ranked]


def _raw_user_defined(pieces: list[str], types: list[int]) -> list[str]:
    """Write "▁" as a space in user-defined tokens, which are matched in the raw text."""
    return [
        piece.replace(SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else piece
        for piece, kind in zip(pieces, types, strict=True)
    ]


def _check_bytes(fields: GGUFFields, types: list[int]) -> None:
    pieces = [piece for piece, kind in zip(fields.tokens, types, strict=True) if kind == TokenType.BYTE]
    num_bytes = sum(BYTE_PIECE.fullmatch(piece) is not None for piece in pieces)
    if num_bytes != 256:
        raise FileFormatError(
            f"{fields.name}: expected the 256 byte tokens <0x00> to <0xFF>, got {num_bytes}"
        )
