"""Divides reasoning from the answer proper."""

from octavo.server.parsing.pieces import Piece, partial_marker


class ReasoningReader:
    """Reads reasoning at an answer's beginning; white space around it is dropped.

    A marker later in the text is content: somebody may be writing about it.
    """

    def __init__(self, begin: str, end: str, *, has_begun: bool) -> None:
        """Begin at an answer's beginning.

        Args:
            begin: opens the reasoning.
            end: closes it.
            has_begun: the prompt opened it.
        """
        self._begin = begin
        self._end = end
        self._state = "inside" if has_begun else "before"
        # White space that may be dropped.
        self._held: list[str] = []
        self._is_first = True
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        """Take the next characters; return what is certain by now."""
        if self._state == "outside":
            return [Piece("content", text)] if text else []
        pieces: list[Piece] = []
        self._text += text
        if self._state == "before":
            self._before(pieces)
        if self._state == "inside":
            self._inside(pieces)
        if self._state == "after":
            self._after(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended."""
        text = "".join(self._held) + self._text
        if self._state == "inside":
            return [Piece("reasoning", text)] if self._text else []
        return [Piece("content", text)] if text and self._state == "before" else []

    def _before(self, pieces: list[Piece]) -> None:
        word = self._text.lstrip()
        self._held.append(self._text[: len(self._text) - len(word)])
        self._text = word
        if word.startswith(self._begin):
            self._text = word[len(self._begin) :]
            self._held = []
            self._state = "inside"
        elif not self._begin.startswith(word):
            pieces.append(Piece("content", "".join(self._held) + word))
            self._text, self._state = "", "outside"

    def _inside(self, pieces: list[Piece]) -> None:
        at = self._text.find(self._end)
        end = len(self._text) - partial_marker(self._text, self._end) if at < 0 else at
        part, self._text = self._text[:end], self._text[end:]
        if self._is_first:
            part = part.lstrip()
        shown = part.rstrip()
        if shown:
            pieces.append(Piece("reasoning", "".join(self._held) + shown))
            self._held, self._is_first = [], False
        if part != shown:
            self._held.append(part[len(shown) :])
        if at >= 0:
            self._text = self._text[len(self._end) :]
            self._held, self._state = [], "after"

    def _after(self, pieces: list[Piece]) -> None:
        text, self._text = self._text.lstrip(), ""
        if text:
            pieces.append(Piece("content", text))
            self._state = "outside"
