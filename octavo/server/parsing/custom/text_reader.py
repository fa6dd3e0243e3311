"""Turns calls of functions of one text back into calls of custom tools."""

import json
import re
from collections.abc import Sequence, Set

from octavo.server.parsing.answer import Reader
from octavo.server.parsing.custom.text_tool import INPUT
from octavo.server.parsing.piece import Piece

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a JSON string; an escape of a pair of surrogates is one.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


class CustomReader:
    """Divides one answer like another reader, but calls of custom tools have texts instead of arguments."""

    def __init__(self, reader: Reader, names: Set[str]) -> None:
        """Start at the beginning of an answer.

        Args:
            reader: divides the answer.
            names: custom tools.
        """
        self._reader = reader
        self._names = names
        self._is_custom = self._has_begun = False
        self._held = ""

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._reader.num_calls

    def new_id(self) -> str:
        """Return an id for a call."""
        return self._reader.new_id()

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take the next characters and the ids of their tokens; return what is certain by now."""
        return self._turned(self._reader.feed(text, token_ids))

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended."""
        return self._turned(self._reader.finish())

    def _turned(self, pieces: list[Piece]) -> list[Piece]:
        return [turned for piece in pieces for turned in self._piece(piece)]

    def _piece(self, piece: Piece) -> list[Piece]:
        if piece.kind == "call":
            self._is_custom, self._has_begun, self._held = piece.text in self._names, False, ""
            return [Piece("custom", piece.text) if self._is_custom else piece]
        if piece.kind != "arguments" or not self._is_custom:
            return [piece]
        text = self._text(piece.text)
        return [Piece("input", text)] if text else []

    def _text(self, arguments: str) -> str:
        """Return what more of the arguments say of the text."""
        self._held += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._has_begun, self._held = True, self._held[begin.end() :]
        whole = _WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        text: str = json.loads(f'"{whole[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
