"""Builds byte-level BPE vocabularies, such as GPT-2's, from GGUF metadata."""

import logging

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.errors import FileFormatError, UnsupportedModelError
from octavo.tokenizer.gguf_fields import GGUFFields

logger = logging.getLogger(__name__)

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

# The same without contractions, and each digit is a word.
TEKKEN_WORDS = GPT4O_WORDS.replace(_CONTRACTION, "").replace(r"\p{N}{1,3}", r"\p{N}")
# What llama.cpp does with files that name no rule, one cut after the other.
_DEFAULT_CUTS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)

# Names of rules in GGUF files with which encoding begins with the first token, where a file does not say.
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
