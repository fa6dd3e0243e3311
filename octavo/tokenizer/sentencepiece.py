"""Builds SentencePiece BPE vocabularies, such as those of Llama 2, Mistral and Gemma, from GGUF metadata."""

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, normalizers

from octavo.errors import FileFormatError
from octavo.tokenizer.byte_level import unique_pieces
from octavo.tokenizer.decoding import BYTE_PIECE, SPACE_MARK
from octavo.tokenizer.gguf_fields import GGUFFields, TokenType


def build_sentencepiece(fields: GGUFFields, types: list[int]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback.

    A "▁" stands for a space. Unless tokenizer.ggml.add_space_prefix is false (Gemma), encoding puts a space
    before each stretch of text between special tokens, and decoding removes the first one again.

    Args:
        fields: the file's metadata.
        types: the TokenType of each token id.

    Raises:
        FileFormatError: a piece occurs twice, or scores or bytes are missing.
    """
    if fields.scores is None:
        raise FileFormatError(f"{fields.name}: expected the metadata key tokenizer.ggml.scores, got none")
    pieces, scores = fields.tokens, fields.scores
    vocabulary = unique_pieces(_raw_user_defined(pieces, types), fields.name)
    _check_bytes(fields, types)
    normal = {pieces[i]: scores[i] for i, kind in enumerate(types) if kind == TokenType.NORMAL}
    unknown = next((pieces[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    merges = merges_from_scores(normal)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if fields.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if fields.add_space_prefix else []
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
