"""Turns token ids back into text, all at once or as they arrive.

Every token stands for a fixed string of bytes, whatever its neighbours are, so the text is the UTF-8
decoding of the concatenated bytes. Streaming costs one table lookup per token and holds back only
incomplete characters:

    token ids    [ "caf" ] [ C3 ] [ A9 ] [ " au" ]
    pushed text    caf      -      é       " au"      the incomplete character C3 is held back

Vocabularies of SentencePiece have tokens of single bytes for characters without a piece. A run of these is
text if all of it is valid UTF-8; else each byte becomes U+FFFD, as in the tokenizers package. So a run is
held back until another token ends it.
"""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from octavo.errors import InvalidArgumentError, UnsupportedModelError

SPACE_MARK = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class PieceStyle:
    """How the pieces of a vocabulary spell bytes.

    Attributes:
        byte_level: True if each character of a piece stands for one byte (GPT-2); False if a piece is
            text with "▁" for a space and "<0x41>" for a single byte (SentencePiece).
        leading_spaces: number of spaces that encoding puts before the text and decoding removes.
    """

    byte_level: bool
    leading_spaces: int = 0


def byte_level_alphabet() -> dict[str, int]:
    """Map each of the 256 characters of byte-level vocabularies to the byte it stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are written with the
    characters from U+0100 on, so that no piece holds a space or a control character.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_style(backend: tokenizers.Tokenizer, name: str) -> PieceStyle:
    """Find out from a tokenizer's decoder how its pieces spell bytes.

    Raises:
        UnsupportedModelError: the decoder is neither byte-level nor SentencePiece with byte fallback.
    """
    if backend.decoder is None:
        raise UnsupportedModelError(f"{name}: expected a tokenizer with a decoder, got none")
    decoder = json.loads(backend.decoder.__getstate__())
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return PieceStyle(byte_level=True)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space_mark(stages[0]):
        if len(kinds) == 3:
            return PieceStyle(byte_level=False)
        if kinds[3:] == ["Strip"] and stages[3]["content"] == " " and stages[3]["stop"] == 0:
            return PieceStyle(byte_level=False, leading_spaces=stages[3]["start"])
    raise UnsupportedModelError(
        f"{name}: expected the decoder ByteLevel, or Replace, ByteFallback, Fuse and at most a leading "
        f"Strip; got {' -> '.join(kinds)}"
    )


def _replaces_space_mark(stage: dict) -> bool:
    return stage["pattern"] == {"String": SPACE_MARK} and stage["content"] == " "


class TokenBytes:
    """The bytes of each token of one vocabulary, looked up on first use.

    Args:
        backend: the vocabulary; not changed.
        style: how its pieces spell bytes.
        special_ids: tokens that `skip_special_tokens` leaves out.

    Attributes:
        byte_ids: tokens of a single byte, in vocabularies whose other pieces are text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, style: PieceStyle, special_ids: frozenset[int]) -> None:
        self.leading_spaces = style.leading_spaces
        self.special_ids = special_ids
        self._backend = backend
        self._alphabet = byte_level_alphabet() if style.byte_level else None
        self._known: dict[int, bytes] = {}
        names = [f"<0x{byte:{form}}>" for byte in range(256) for form in ("02X", "02x")]
        ids = [] if style.byte_level else [backend.token_to_id(name) for name in names]
        self.byte_ids = frozenset(token_id for token_id in ids if token_id is not None)

    def of(self, token_id: int) -> bytes:
        """Return one token's bytes; empty for ids without a piece, which pad some models' vocabularies.

        Raises:
            InvalidArgumentError: the id is not an integer in [0, 2**32).
        """
        known = self._known.get(token_id)
        if known is None:
            known = self._look_up(token_id)
            if known:  # ids outside the vocabulary are not kept: there are too many
                self._known[token_id] = known
        return known

    def _look_up(self, token_id: int) -> bytes:
        try:
            piece = self._backend.id_to_token(token_id)
        except (OverflowError, TypeError) as error:
            raise InvalidArgumentError(
                f"a token id must be an integer in [0, 2**32), got {token_id!r}"
            ) from error
        if piece is None:
            return b""
        return self._sentencepiece_bytes(piece) if self._alphabet is None else self._byte_level_bytes(piece)

    def _byte_level_bytes(self, piece: str) -> bytes:
        assert self._alphabet is not None
        try:
            return bytes([self._alphabet[character] for character in piece])
        except KeyError:  # an added token is plain text, possibly outside the alphabet
            return piece.encode()

    @staticmethod
    def _sentencepiece_bytes(piece: str) -> bytes:
        byte = BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()


class IncrementalDecoder:
    """Decodes the token ids of one answer as they arrive.

    The texts of all pushes and of `finish` add up to `Tokenizer.decode` of all ids. A push never ends within
    a character; bytes that cannot become valid UTF-8 turn into U+FFFD as soon as that is certain. Each token
    takes constant time, however long the answer is.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = _ByteRun()
        self._leading_spaces = token_bytes.leading_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode the next token ids; return the text that they complete, possibly empty.

        Raises:
            InvalidArgumentError: an id is not an integer in [0, 2**32).
        """
        bytes_of, skipped = self._token_bytes.of, self._skipped
        if not self._token_bytes.byte_ids:
            pushed = b"".join([bytes_of(i) for i in token_ids if i not in skipped])
            return self._without_leading_spaces(self._utf8.decode(pushed))
        text = "".join([self._piece(i, bytes_of(i)) for i in token_ids if i not in skipped])
        return self._without_leading_spaces(text)

    def finish(self) -> str:
        """End the answer; return the text of the bytes that are held back."""
        return self._without_leading_spaces(self._utf8.decode(b"", final=True) + self._run.end())

    def _piece(self, token_id: int, piece: bytes) -> str:
        if token_id in self._token_bytes.byte_ids:
            return self._run.push(piece)
        # Ids that pad a vocabulary have no piece, and end no run.
        return self._run.end() + piece.decode() if piece else ""

    def _without_leading_spaces(self, text: str) -> str:
        while text and self._leading_spaces:
            if text[0] != " ":
                self._leading_spaces = 0
                break
            text = text[1:]
            self._leading_spaces -= 1
        return text


class _ByteRun:
    """Tokens of single bytes, one after the other: text if all are valid UTF-8, or else U+FFFD for each."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._is_invalid = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, byte: bytes) -> str:
        """Take the next byte; return what is certain."""
        if self._is_invalid:
            return _REPLACEMENT
        self._pending += byte
        try:
            self._utf8.decode(byte)
        except UnicodeDecodeError:
            self._is_invalid = True
            return self._emptied(_REPLACEMENT * len(self._pending))
        return ""

    def end(self) -> str:
        """End the run; return the text that was held back."""
        self._is_invalid = False
        self._utf8.reset()
        if not self._pending:
            return ""
        try:
            return self._emptied(self._pending.decode())
        except UnicodeDecodeError:  # a character is incomplete
            return self._emptied(_REPLACEMENT * len(self._pending))

    def _emptied(self, text: str) -> str:
        self._pending.clear()
        return text
