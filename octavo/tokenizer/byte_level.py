"""Byte-level BPE vocabularies (GPT-2's kind) from GGUF metadata."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.gguf_fields import GGUFFields

# How a text is cut into words before merges, as the models' own tokenizer.json files have it; the two
# differ in how many digits form one word.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _llama3() -> PreTokenizer:
    return _words(LLAMA3_WORDS)


def _qwen2() -> PreTokenizer:
    return _words(QWEN2_WORDS)


LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
PRE_TOKENIZERS: Mapping[str, Callable[[], PreTokenizer]] = MappingProxyType(
    {"default": _gpt2, "gpt-2": _gpt2, "smollm": _smollm, "qwen2": _qwen2}
    | dict.fromkeys(sorted(LLAMA3_NAMES), _llama3)
)
NORMALIZERS: Mapping[str, Callable[[], Normalizer]] = MappingProxyType({"qwen2": normalizers.NFC})
# llama 3 vocabularies hold whole words that no chain of merges reaches
WHOLE_WORDS_FIRST = LLAMA3_NAMES
BOS_BY_DEFAULT = LLAMA3_NAMES


def build_byte_level(fields: GGUFFields, pieces: list[str], pre_tokenizer: str) -> Tokenizer:
    """Build a byte-level BPE tokenizer.

    Args:
        fields: the file's metadata; tokenizer.ggml.merges is read from it.
        pieces: the piece of each token id.
        pre_tokenizer: value of tokenizer.ggml.pre, which names the rule that cuts text into words.

    Raises:
        FileFormatError: a piece occurs twice, or a merge is malformed or names an unknown piece.
        UnsupportedModelError: the pre-tokenizer is not one that Octavo has.
    """
    if pre_tokenizer not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{fields.name}: expected tokenizer.ggml.pre to be one of {sorted(PRE_TOKENIZERS)}, "
            f"got {pre_tokenizer!r}"
        )
    vocabulary = unique_pieces(pieces, fields.name)
    merges = _merges(fields)
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre_tokenizer in WHOLE_WORDS_FIRST)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise FileFormatError(f"{fields.name}: tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    if pre_tokenizer in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[pre_tokenizer]()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unique_pieces(pieces: list[str], name: str) -> dict[str, int]:
    """Token id of each piece.

    Raises:
        FileFormatError: a piece occurs twice.
    """
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        twice = next(piece for token_id, piece in enumerate(pieces) if vocabulary[piece] != token_id)
        raise FileFormatError(f"{name}: expected tokenizer.ggml.tokens to differ, got {twice!r} twice")
    return vocabulary


def _merges(fields: GGUFFields) -> list[tuple[str, str]]:
    """The merges, each written as two pieces with a space between them; no piece holds a space."""
    merges: list[tuple[str, str]] = []
    for merge in fields.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise FileFormatError(f"{fields.name}: expected a merge as two pieces, got {merge!r}")
        merges.append((left, right))
    return merges
