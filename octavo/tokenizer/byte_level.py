"""Builds byte-level BPE vocabularies, such as GPT-2's, from GGUF metadata."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.gguf_fields import GGUFFields

# How text is cut into words before merges, as in the models' own tokenizer.json files. The two differ in how
# many digits form one word.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# Words begin where small letters are followed by large ones, and keep their contractions.
_LARGE, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]*[{_SMALL}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_LARGE}]+[{_SMALL}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
# Vocabularies that hold whole words, which need no merges.
_WHOLE_WORDS = LLAMA3_NAMES | {"gpt-4o"}
_WORDS = {"qwen2": QWEN2_WORDS, "gpt-4o": GPT4O_WORDS} | dict.fromkeys(LLAMA3_NAMES, LLAMA3_WORDS)
PRE_TOKENIZERS = frozenset({"default", "gpt-2", "smollm", *_WORDS})


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
    vocabulary = unique_pieces(fields.tokens, fields.name)
    merges = _merges(fields)
    try:
        # Llama 3 vocabularies hold whole words that no chain of merges reaches.
        model = models.BPE(vocabulary, merges, ignore_merges=fields.pre in _WHOLE_WORDS)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise FileFormatError(f"{fields.name}: tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    if fields.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name in _WORDS:
        words = pre_tokenizers.Split(Regex(_WORDS[name]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, byte_level])
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
